"""What a supervisor and its ranks say to each other, through files of the run directory. Imports no torch."""
