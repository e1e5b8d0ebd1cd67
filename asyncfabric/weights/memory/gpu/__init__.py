"""Memory of a GPU, with torch and compiled kernels. Imported when the first GPU is asked for."""
