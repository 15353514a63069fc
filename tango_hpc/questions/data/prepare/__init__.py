"""Public data sets as one Parquet schema: read, checked, without duplicates and without what evaluation sets hold."""
