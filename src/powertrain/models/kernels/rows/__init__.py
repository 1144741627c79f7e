"""The elementwise stretches of a block on a CPU: kernels of our own, in C++ that is compiled for the machine it runs on."""
