// What each source adds to the one extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace ray_pipe {

void bind_kernels(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_crc32(nanobind::module_& m);
void bind_wire(nanobind::module_& m);

}  // namespace ray_pipe
