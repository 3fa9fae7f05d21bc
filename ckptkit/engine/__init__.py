"""Running a plan: reading, checking, casting and writing under a memory budget."""
