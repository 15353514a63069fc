"""Advantages of verifications, Eq. 9."""
