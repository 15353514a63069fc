"""What came after the paper and fits its loop as it is: a file each, switched on by a setting of its own."""
