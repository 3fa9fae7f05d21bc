"""Running a plan: reading, checking, transforming, writing."""
