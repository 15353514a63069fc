"""Data sets: Parquet files of questions, and the order in which training draws from them."""
