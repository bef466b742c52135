"""A tensor-parallel decoder, and how long it takes with one way of communicating and another."""
