"""Sources of termination notices, and the threads that poll them."""
