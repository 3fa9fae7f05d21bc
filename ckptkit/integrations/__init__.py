"""Into the loops of other libraries: accelerate, Transformers, Lightning."""
