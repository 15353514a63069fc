"""Pages and pictures: the pages of a run, an evaluation and a sweep, the display of a run, rollouts to read."""
