// ray_pipe_native: the C++ core as one extension module.
//
// Imported by its Python facades only (compressors/native.py); typed by ray_pipe_native.pyi. A new
// part brings its own source, a bind_… function in bind.hpp and a line here.
#include "bind.hpp"

// Raised when an entry point changes; the facades refuse a module built for another number.
constexpr int kAbi = 3;

NB_MODULE(ray_pipe_native, m) {
  m.attr("ABI") = kAbi;
  ray_pipe::bind_kernels(m);
  ray_pipe::bind_rows(m);
  ray_pipe::bind_crc32(m);
  ray_pipe::bind_wire(m);
}
