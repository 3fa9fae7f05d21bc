"""Pure computation on blocks of elements."""
