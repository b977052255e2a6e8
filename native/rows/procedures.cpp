#include "procedures.hpp"

#include <cmath>

namespace ray_pipe::rows {

namespace {

// Everything a body needs from one turn of its loop. Bodies return at the first trouble: the runner
// makes room and starts them again.
bool spilled(const Get& get) { return get.found.row && get.found.row->spilled(); }

void show(const Arguments* a, int64_t i, const Version* row) {
  const size_t dim = a->table->config.dim;
  if (a->seen) a->seen[i] = row != nullptr;
  if (!a->out) return;
  if (row) a->table->read(row, a->out + static_cast<size_t>(i) * dim);
  else std::memset(a->out + static_cast<size_t>(i) * dim, 0, 4 * dim);
}

const float* row_of(const Arguments* a, int64_t i) {
  return a->payload + static_cast<size_t>(i) * a->table->config.dim;
}

const float* initial(Txn& txn, const Table& table, int64_t key) {
  txn.scratch.resize(table.config.dim);
  table.init(key, txn.scratch.data());
  return txn.scratch.data();
}

Body get(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    show(a, i, at.found.row);
  }
  co_return Status::ok;
}

Body get_or_init(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    if (!at.found.row) {
      const float* weights = initial(txn, *a->table, a->keys[i]);
      Version* fresh = txn.write(at, a->table->all_chunks());
      if (!fresh) co_return txn.trouble;
      a->table->fill(fresh, a->keys[i], weights, a->table->all_chunks());
      at.found.row = fresh;
    }
    show(a, i, at.found.row);
  }
  co_return Status::ok;
}

Body put(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    const Version* old = at.found.row;
    const uint8_t alive = old ? old->alive() : a->table->all_chunks();
    Version* fresh = txn.write(at, alive);
    if (!fresh) co_return txn.trouble;
    if (old) a->table->rewrite(fresh, old, row_of(a, i));
    else a->table->fill(fresh, a->keys[i], row_of(a, i), alive);
    show(a, i, fresh);
  }
  co_return Status::ok;
}

// row += delta. A row that is not there begins as `start` says. Mode 0 only reads.
Body add_to(Txn& txn, const Arguments* a, size_t t, bool from_zero) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    if (a->modes && !a->modes[i]) {
      show(a, i, at.found.row);
      continue;
    }
    const Version* old = at.found.row;
    const uint8_t alive = old ? old->alive() : a->table->all_chunks();
    Version* fresh = txn.write(at, alive);
    if (!fresh) co_return txn.trouble;
    if (old) {
      a->table->copy(fresh, old);
    } else {
      const float* weights = initial(txn, *a->table, a->keys[i]);
      if (from_zero) std::fill(txn.scratch.begin(), txn.scratch.end(), 0.0f);
      a->table->fill(fresh, a->keys[i], weights, alive);
    }
    a->table->add(fresh, row_of(a, i));
    show(a, i, fresh);
  }
  co_return Status::ok;
}
Body add(Txn& txn, const Arguments* a, size_t t) { return add_to(txn, a, t, false); }
Body delta_step(Txn& txn, const Arguments* a, size_t t) { return add_to(txn, a, t, true); }

Body optimize(Txn& txn, const Arguments* a, size_t t) {
  const uint32_t dim = a->table->config.dim;
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    const float* gradient = row_of(a, i);
    bool finite = true;
    for (uint32_t d = 0; d < dim; ++d) finite = finite && std::isfinite(gradient[d]);
    if (!finite) co_return Status::nonfinite;
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    const Version* old = at.found.row;
    if (old) {
      Version* fresh = txn.write(at, old->alive());
      if (!fresh) co_return txn.trouble;
      a->table->optimize(fresh, old, gradient, 1.0f, a->step);
      at.found.row = fresh;
    }
    show(a, i, at.found.row);
  }
  co_return Status::ok;
}

// payload has two rows by key: what the row must be to the bit, and what it becomes.
Body compare_and_put(Txn& txn, const Arguments* a, size_t t) {
  const size_t dim = a->table->config.dim;
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    const Version* old = at.found.row;
    if (!old) co_return Status::conflict;
    txn.scratch.resize(dim);
    a->table->read(old, txn.scratch.data());
    if (std::memcmp(txn.scratch.data(), row_of(a, 2 * i), 4 * dim) != 0) co_return Status::conflict;
    Version* fresh = txn.write(at, old->alive());
    if (!fresh) co_return txn.trouble;
    a->table->rewrite(fresh, old, row_of(a, 2 * i + 1));
    show(a, i, fresh);
  }
  co_return Status::ok;
}

// sample -> row id -> row: each row names the next key. What comes out is the last row.
Body follow(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    int64_t key = a->keys[i];
    for (int64_t hop = 0;; ++hop) {
      Get at = co_await Read(txn, *a->table, key);
      if (spilled(at)) co_return Status::pending;
      if (hop == a->hops || !at.found.row || !a->table->link(at.found.row, key)) {
        show(a, i, at.found.row);
        break;
      }
    }
  }
  co_return Status::ok;
}

// modes: the chunks that the row keeps, or gets back as zeros.
Body prune(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (spilled(at)) co_return Status::pending;
    const Version* old = at.found.row;
    if (a->seen) a->seen[i] = old != nullptr;
    const uint8_t alive = a->modes[i] & a->table->all_chunks();
    if (!old || old->alive() == alive) continue;
    Version* fresh = txn.write(at, alive);
    if (!fresh) co_return txn.trouble;
    a->table->reshape(fresh, old, alive);
  }
  co_return Status::ok;
}

Body evict(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    if (a->seen) a->seen[i] = at.found.row != nullptr;
    if (at.found.row && !txn.write_header(at, kTombstone)) co_return txn.trouble;
  }
  co_return Status::ok;
}

// The commit of an interactive transaction. Every key must still have the stamp that was read
// (kIdle: not read). modes: 0 read, 1 put, 2 delete.
Body commit_if(Txn& txn, const Arguments* a, size_t t) {
  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; ++i) {
    Get at = co_await Read(txn, *a->table, a->keys[i]);
    const Version* old = at.found.row;
    if (a->expected[i] != kIdle && (old ? old->stamp() : 0) != a->expected[i])
      co_return Status::conflict;
    if (spilled(at)) co_return Status::pending;
    if (a->modes[i] == 1) {
      const uint8_t alive = old ? old->alive() : a->table->all_chunks();
      Version* fresh = txn.write(at, alive);
      if (!fresh) co_return txn.trouble;
      if (old) a->table->rewrite(fresh, old, row_of(a, i));
      else a->table->fill(fresh, a->keys[i], row_of(a, i), alive);
    } else if (a->modes[i] == 2 && old && !txn.write_header(at, kTombstone)) {
      co_return txn.trouble;
    }
  }
  co_return Status::ok;
}

constexpr struct {
  const char* name;
  Procedure body;
} kProcedures[] = {{"get", get},
                   {"get_or_init", get_or_init},
                   {"put", put},
                   {"add", add},
                   {"delta_step", delta_step},
                   {"optimize", optimize},
                   {"compare_and_put", compare_and_put},
                   {"follow", follow},
                   {"prune", prune},
                   {"evict", evict},
                   {"commit_if", commit_if}};

}  // namespace

Procedure procedure(const std::string& name) {
  for (const auto& p : kProcedures)
    if (name == p.name) return p.body;
  return nullptr;
}

std::vector<std::string> procedure_names() {
  std::vector<std::string> names;
  for (const auto& p : kProcedures) names.emplace_back(p.name);
  return names;
}

}  // namespace ray_pipe::rows
