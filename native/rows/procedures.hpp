// The transactions that Python can name. Each is a coroutine over the keys of one transaction.
#pragma once

#include <string>
#include <vector>

#include "lanes.hpp"

namespace ray_pipe::rows {

// An array of transactions: transaction t has the keys [offsets[t], offsets[t + 1]).
struct Arguments {
  Table* table = nullptr;
  const int64_t* offsets = nullptr;
  const int64_t* keys = nullptr;
  const float* payload = nullptr;     // rows, by key
  const uint8_t* modes = nullptr;     // by key; what they mean is the procedure's affair
  const uint64_t* expected = nullptr;  // stamps, by key
  float* out = nullptr;
  uint8_t* seen = nullptr;
  StepNumbers step;
  int64_t hops = 1;
};

using Procedure = Body (*)(Txn&, const Arguments*, size_t);

// nullptr: there is none of this name.
Procedure procedure(const std::string& name);
std::vector<std::string> procedure_names();

}  // namespace ray_pipe::rows
