"""Plans for Hopper (compute capability 9.0): kernels in Gluon, fed by the copy engine of a multiprocessor."""
