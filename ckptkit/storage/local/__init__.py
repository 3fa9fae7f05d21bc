"""Files on a local or shared file system."""
