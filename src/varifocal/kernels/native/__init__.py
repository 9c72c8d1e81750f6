"""Native CPU kernels: a C++ library behind a C header, and the torch operators over it."""
