// One thread block after another, its warps in turns, one instruction at a time.
//
// What it finds beside wrong results, each as a Fault that names the instruction:
//   - reads and writes of global memory outside the buffers that the caller declared;
//   - shared memory outside the allocation; barriers used before they are initialized;
//   - operands of asynchronous products or copies that a generic store wrote without a proxy fence;
//   - shared memory overwritten while an asynchronous product still reads it;
//   - thread blocks that stop: every warp waits and nothing is in flight.
// Copies into shared memory arrive late and in any order, and spoil their target until then, so that a
// missing wait is a wrong result. Warps run for random lengths in random order, from a seed.
//
// Not modelled: time, the memory model between thread blocks, the accumulator's precision of 8-bit
// products, and reads of an accumulator before its product is waited for.

#pragma once

#include <random>

#include "numbers.h"
#include "program.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;

struct Range {
  uint64_t begin, end;
};

struct Launch {
  const Kernel* kernel;
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  void** arguments;
};

struct Fragment {  // threads of a warp at one instruction
  int32_t pc;
  uint32_t mask;
  bool is_waiting;
};

struct Product {  // an asynchronous product in flight: what it reads of shared memory
  std::vector<uint32_t> granules;
  uint64_t clock;
  const Instruction* inst;
};

struct Warp {
  int index;
  uint32_t alive = kAll;
  std::vector<Fragment> fragments;
  std::vector<uint32_t> r32;
  std::vector<uint64_t> r64;
  std::vector<uint32_t> predicates;
  int64_t barrier_turn = -1;  // the turn of the named barrier that it waits for
  std::vector<Product> open, committed;  // committed: `groups` says how many of each group
  std::vector<size_t> groups;
  std::vector<uint32_t> unfenced;  // granules that it wrote
};

struct Barrier {  // in shared memory
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  bool is_initialized = false;
};

struct NamedBarrier {
  uint32_t arrived = 0;
  int64_t turn = 0;
};

struct Copy {  // into shared memory, in flight
  TensorMap map;
  int64_t at[5];
  uint32_t target, barrier;
  const Instruction* inst;
};

class Machine {
 public:
  Machine(const Launch& launch, const std::vector<Range>& memory, uint64_t seed)
      : launch_(launch), kernel_(*launch.kernel), memory_(memory), random_(seed) {
    parameters_.resize(kernel_.parameter_bytes + 128);
    // a tensor map is read through a pointer, which must be aligned
    parameter_base_ = (uint8_t*)(((uintptr_t)parameters_.data() + 63) / 64 * 64);
    for (size_t i = 0; i < kernel_.parameters.size(); ++i) {
      const Parameter& p = kernel_.parameters[i];
      memcpy(parameter_base_ + p.offset, launch.arguments[i], p.size);
    }
  }

  void run() {
    for (uint32_t z = 0; z < launch_.grid[2]; ++z)
      for (uint32_t y = 0; y < launch_.grid[1]; ++y)
        for (uint32_t x = 0; x < launch_.grid[0]; ++x) {
          block_[0] = x, block_[1] = y, block_[2] = z;
          run_block();
        }
  }

 private:
  const Launch& launch_;
  const Kernel& kernel_;
  const std::vector<Range>& memory_;
  std::mt19937_64 random_;
  std::vector<uint8_t> parameters_;
  uint8_t* parameter_base_;
  uint32_t block_[3];
  std::vector<Warp> warps_;
  std::vector<uint8_t> shared_;
  std::vector<uint64_t> written_;   // by granule of 16 bytes: the clock of its last write
  std::vector<uint8_t> is_unfenced_;
  std::vector<Barrier> barriers_;   // by shared address / 8
  NamedBarrier named_[16];
  std::vector<Copy> copies_;
  uint64_t clock_ = 0;
  bool has_progress_ = false;
  const Instruction* current_ = nullptr;
  size_t last_range_ = 0;

  [[noreturn]] void fail(const std::string& what, const Instruction* inst = nullptr) const {
    inst = inst ? inst : current_;
    throw Fault("block (" + std::to_string(block_[0]) + "," + std::to_string(block_[1]) + "," +
                std::to_string(block_[2]) + "): " + what +
                (inst ? " in line " + std::to_string(inst->line) + ": " + inst->text.substr(0, 200)
                      : ""));
  }

  // a thread block

  void run_block() {
    uint32_t threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
    shared_.assign(launch_.shared_bytes, 0xff);
    written_.assign(launch_.shared_bytes / 16 + 1, 0);
    is_unfenced_.assign(launch_.shared_bytes / 16 + 1, 0);
    barriers_.assign(launch_.shared_bytes / 8 + 1, Barrier());
    std::fill(std::begin(named_), std::end(named_), NamedBarrier());
    copies_.clear();
    warps_.assign((threads + kLanes - 1) / kLanes, Warp());
    for (size_t i = 0; i < warps_.size(); ++i) {
      Warp& w = warps_[i];
      w.index = i;
      uint32_t count = std::min<uint32_t>(threads - i * kLanes, kLanes);
      w.alive = count == kLanes ? kAll : (1u << count) - 1;
      w.fragments = {{0, w.alive, false}};
      w.r32.assign((size_t)kernel_.registers32 * kLanes, 0xdeadbeef);
      w.r64.assign((size_t)kernel_.registers64 * kLanes, 0xdeadbeefdeadbeef);
      w.predicates.assign(kernel_.predicates, 0);
    }
    std::vector<size_t> order(warps_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    while (true) {
      std::shuffle(order.begin(), order.end(), random_);
      has_progress_ = false;
      bool is_alive = false;
      for (size_t i : order)
        if (warps_[i].alive) {
          is_alive = true;
          run_warp(warps_[i], 1 + random_() % 3000);
        }
      if (!is_alive) break;
      if (!copies_.empty() && (!has_progress_ || random_() % 2)) {
        arrive(random_() % copies_.size());
      } else if (!has_progress_) {
        fail_stopped();
      }
    }
    if (!copies_.empty()) fail("a copy into shared memory outlives the block", copies_[0].inst);
  }

  void fail_stopped() {
    std::string where;
    for (Warp& w : warps_)
      for (Fragment& f : w.fragments)
        if (w.alive) {
          const Instruction& inst = kernel_.code[f.pc];
          where += "\n  warp " + std::to_string(w.index) + " line " + std::to_string(inst.line) +
                   ": " + inst.text;
        }
    fail("every warp waits and nothing is in flight:" + where, &kernel_.code[0]);
  }

  // The fragment that is furthest behind runs, so that threads meet again where the paths join.
  void run_warp(Warp& w, int budget) {
    for (Fragment& f : w.fragments) f.is_waiting = false;
    while (w.alive && budget-- > 0) {
      Fragment* chosen = nullptr;
      for (Fragment& f : w.fragments)
        if (!f.is_waiting && (!chosen || f.pc < chosen->pc)) chosen = &f;
      if (!chosen) return;
      step(w, *chosen);
    }
  }

  void step(Warp& w, Fragment& f) {
    const Instruction& inst = kernel_.code[f.pc];
    current_ = &inst;
    uint32_t mask = f.mask;
    if (inst.guard >= 0)
      mask &= inst.guard_negated ? ~w.predicates[inst.guard] : w.predicates[inst.guard];
    if (inst.target >= 0) return branch(w, f, inst, mask);
    if (inst.name == "ret" || inst.name == "exit") {
      w.alive &= ~mask;
      has_progress_ = true;
      if (mask == f.mask)
        w.fragments.erase(w.fragments.begin() + (&f - w.fragments.data()));
      else
        f.mask &= ~mask, ++f.pc;
      return merge(w);
    }
    if (mask && !execute(w, inst, mask)) {
      f.is_waiting = true;
      return;
    }
    has_progress_ = true;
    ++f.pc;
    if (w.fragments.size() > 1) merge(w);
  }

  void branch(Warp& w, Fragment& f, const Instruction& inst, uint32_t taken) {
    has_progress_ = true;
    if (taken == f.mask) {
      f.pc = inst.target;
    } else if (taken == 0) {
      ++f.pc;
    } else {
      Fragment other{inst.target, taken, false};
      f.mask &= ~taken;
      ++f.pc;
      w.fragments.push_back(other);
    }
    if (w.fragments.size() > 1) merge(w);
  }

  void merge(Warp& w) {
    for (size_t i = 0; i < w.fragments.size(); ++i)
      for (size_t j = i + 1; j < w.fragments.size();)
        if (w.fragments[i].pc == w.fragments[j].pc) {
          w.fragments[i].mask |= w.fragments[j].mask;
          w.fragments[i].is_waiting = false;
          w.fragments.erase(w.fragments.begin() + j);
        } else {
          ++j;
        }
  }

  // operands

  uint64_t special(const Operand& o, const Warp& w, int lane) const {
    uint32_t thread = w.index * kLanes + lane;
    switch (o.index) {
      case 0: return thread % launch_.block[0];
      case 1: return thread / launch_.block[0] % launch_.block[1];
      case 2: return thread / (launch_.block[0] * launch_.block[1]);
      case 3: return launch_.block[0];
      case 4: case 5: case 6: return block_[o.index - 4];
      case 7: case 8: case 9: return launch_.grid[o.index - 7];
      case 10: return lane;
      case 11: return w.index;
      case 1000: return (uint64_t)(parameter_base_ + o.value);
      default: fail("special register");
    }
  }

  void load(const Warp& w, const Operand& o, uint64_t* out) const {
    switch (o.kind) {
      case Operand::kRegister:
        if (o.bits == 64) {
          memcpy(out, &w.r64[o.index * kLanes], 8 * kLanes);
        } else {
          const uint32_t* source = &w.r32[o.index * kLanes];
          for (int i = 0; i < kLanes; ++i) out[i] = source[i];
        }
        return;
      case Operand::kPredicate:
        for (int i = 0; i < kLanes; ++i) out[i] = w.predicates[o.index] >> i & 1;
        return;
      case Operand::kSpecial:
        for (int i = 0; i < kLanes; ++i) out[i] = special(o, w, i);
        return;
      default:
        for (int i = 0; i < kLanes; ++i) out[i] = o.value;
    }
  }

  void load32(const Warp& w, const Operand& o, uint32_t* out) const {
    if (o.kind == Operand::kRegister && o.bits != 64) {
      memcpy(out, &w.r32[o.index * kLanes], 4 * kLanes);
    } else {
      uint64_t wide[kLanes];
      load(w, o, wide);
      for (int i = 0; i < kLanes; ++i) out[i] = (uint32_t)wide[i];
    }
  }

  void store32(Warp& w, const Operand& o, const uint32_t* values, uint32_t mask) const {
    if (o.kind == Operand::kNone) return;
    if (o.bits == 64) {
      uint64_t wide[kLanes];
      for (int i = 0; i < kLanes; ++i) wide[i] = values[i];
      return store(w, o, wide, mask);
    }
    uint32_t* target = &w.r32[o.index * kLanes];
    if (mask == kAll)
      memcpy(target, values, 4 * kLanes);
    else
      for (int i = 0; i < kLanes; ++i)
        if (mask >> i & 1) target[i] = values[i];
  }

  void store(Warp& w, const Operand& o, const uint64_t* values, uint32_t mask) const {
    if (o.kind == Operand::kNone) return;
    if (o.kind == Operand::kPredicate) {
      uint32_t bits = 0;
      for (int i = 0; i < kLanes; ++i) bits |= (uint32_t)(values[i] & 1) << i;
      w.predicates[o.index] = (w.predicates[o.index] & ~mask) | (bits & mask);
    } else if (o.bits == 64) {
      for (int i = 0; i < kLanes; ++i)
        if (mask >> i & 1) w.r64[o.index * kLanes + i] = values[i];
    } else {
      uint32_t cut = o.bits == 16 ? 0xffff : kAll;
      for (int i = 0; i < kLanes; ++i)
        if (mask >> i & 1) w.r32[o.index * kLanes + i] = (uint32_t)values[i] & cut;
    }
  }

  uint32_t scalar(const Warp& w, const Operand& o, uint32_t mask) const {
    uint32_t values[kLanes];
    load32(w, o, values);
    return values[__builtin_ctz(mask)];
  }

  void addresses(const Warp& w, const Address& a, uint64_t* out) const {
    load(w, a.base, out);
    for (int i = 0; i < kLanes; ++i) out[i] += a.offset;
  }

  // memory

  uint8_t* global(uint64_t address, size_t bytes) {
    if (memory_.empty()) fail("no memory is declared");
    const Range& last = memory_[last_range_ % memory_.size()];
    if (address >= last.begin && address + bytes <= last.end) return (uint8_t*)address;
    for (size_t i = 0; i < memory_.size(); ++i)
      if (address >= memory_[i].begin && address + bytes <= memory_[i].end) {
        last_range_ = i;
        return (uint8_t*)address;
      }
    char text[64];
    snprintf(text, sizeof text, "0x%llx (%zu bytes)", (unsigned long long)address, bytes);
    // the buffer that it is nearest to, so that an offset can be told
    const Range* nearest = &memory_[0];
    for (const Range& r : memory_)
      if (std::llabs((int64_t)(address - r.begin)) < std::llabs((int64_t)(address - nearest->begin)))
        nearest = &r;
    fail(std::string("global memory outside every buffer: ") + text + ", byte " +
         std::to_string((int64_t)(address - nearest->begin)) + " of a buffer of " +
         std::to_string(nearest->end - nearest->begin) + " bytes");
  }

  uint8_t* shared(uint32_t address, size_t bytes) {
    uint32_t offset = address - kSharedBase;
    if (address < kSharedBase || offset + bytes > shared_.size())
      fail("shared memory outside the allocation: address " + std::to_string(address));
    if (address % bytes) fail("misaligned shared memory address " + std::to_string(address));
    return &shared_[offset];
  }

  Barrier& barrier(uint32_t address) {
    shared(address, 8);
    return barriers_[(address - kSharedBase) / 8];
  }

  Barrier& initialized(uint32_t address) {
    Barrier& b = barrier(address);
    if (!b.is_initialized) fail("the barrier at " + std::to_string(address) + " is not initialized");
    return b;
  }

  void complete(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) {
      b.phase ^= 1;
      b.pending = b.expected;
    }
    has_progress_ = true;
  }

  void arrive_at(Barrier& b, uint32_t count) {
    if (count > b.pending) fail("more arrivals at a barrier than it expects");
    b.pending -= count;
    complete(b);
  }

  void touch(uint32_t address, size_t bytes) {
    ++clock_;
    for (uint32_t g = (address - kSharedBase) / 16; g <= (address - kSharedBase + bytes - 1) / 16; ++g)
      written_[g] = clock_;
  }

  void touch_generic(Warp& w, uint32_t address, size_t bytes) {
    touch(address, bytes);
    for (uint32_t g = (address - kSharedBase) / 16; g <= (address - kSharedBase + bytes - 1) / 16; ++g) {
      is_unfenced_[g] = 1;
      w.unfenced.push_back(g);
    }
  }

  // copies between global and shared memory

  // calls use(shared address, global address or null) for each 16 bytes of a box
  template <typename Use>
  void each_vector(const TensorMap& map, const int64_t* at, uint32_t target, Use use) {
    uint32_t row_bytes = map.box[0] * map.element_bytes;
    uint32_t rows = map.bytes() / row_bytes;
    for (uint32_t row = 0; row < rows; ++row) {
      uint64_t source = map.address;
      bool is_inside = true;
      uint32_t rest = row;
      for (int d = 1; d < map.rank; ++d) {
        int64_t index = at[d] + rest % map.box[d];
        rest /= map.box[d];
        is_inside = is_inside && index >= 0 && index < (int64_t)map.extent[d];
        source += index * map.stride[d];
      }
      for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
        int64_t column = at[0] * map.element_bytes + byte;
        int64_t width = map.extent[0] * map.element_bytes;
        int64_t live = is_inside && column >= 0 ? std::min<int64_t>(width - column, 16) : 0;
        use(swizzled(target + row * row_bytes + byte, map.swizzle), source + column,
            std::max<int64_t>(live, 0));
      }
    }
  }

  void arrive(size_t index) {
    Copy copy = copies_[index];
    copies_.erase(copies_.begin() + index);
    current_ = copy.inst;
    each_vector(copy.map, copy.at, copy.target, [&](uint32_t to, uint64_t from, int64_t live) {
      uint8_t* target = shared(to, 16);
      memset(target, 0, 16);
      if (live) memcpy(target, global(from, live), live);
      touch(to, 16);
    });
    Barrier& b = initialized(copy.barrier);
    b.bytes -= copy.map.bytes();
    complete(b);
  }

  void start_copy(const TensorMap& map, const int64_t* at, uint32_t target, uint32_t barrier) {
    if (target % 128) fail("a copy's target is not aligned to 128 bytes");
    initialized(barrier);
    copies_.push_back({map, {at[0], at[1], at[2], at[3], at[4]}, target, barrier, current_});
    each_vector(map, at, target, [&](uint32_t to, uint64_t, int64_t) {
      uint32_t granule = (to - kSharedBase) / 16;
      memset(shared(to, 16), 0xff, 16);
      touch(to, 16);
      is_unfenced_[granule] = 0;
    });
  }

  void store_copy(const TensorMap& map, const int64_t* at, uint32_t source) {
    each_vector(map, at, source, [&](uint32_t from, uint64_t to, int64_t live) {
      check_fenced((from - kSharedBase) / 16);
      if (live) memcpy(global(to, live), shared(from, 16), live);
    });
  }

  void check_fenced(uint32_t granule) const {
    if (is_unfenced_[granule])
      fail("the asynchronous proxy reads shared memory that a generic store wrote without a fence");
  }

#include "handlers.h"
};

}  // namespace emulator
