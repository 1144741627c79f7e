"""The decode step on a CPU: a kernel of our own, in C++ that is compiled for the machine it runs on."""
