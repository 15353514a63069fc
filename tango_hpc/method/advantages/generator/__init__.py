"""Advantages of solutions, Eqs. 4 to 7."""
