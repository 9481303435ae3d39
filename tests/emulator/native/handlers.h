// The instructions. Part of Machine.

enum Handler {
  kMov, kLogic, kArithmetic, kWide, kMad, kFma, kCompare, kSelect, kConvert, kUnary, kShuffle, kElect,
  kLoad, kStore, kAtomic, kBarrierInit, kBarrierArrive, kTryWait, kNamed, kWarpSync, kFenceProxy,
  kNothing, kTensorLoad, kTensorStore, kProduct, kProductCommit, kProductWait, kStoreMatrix, kPermute,
  kBitInsert,
};

static bool is_type(const std::string& s) {
  return s.size() >= 2 && (strchr("busf", s[0]) && isdigit(s[1]));
}

public:
// Which handler an instruction takes, once for a program; Fault where it has none.
static void resolve(Kernel& kernel) {
  static const std::map<std::string, int> handlers = {
      {"mov", kMov}, {"cvta", kMov}, {"and", kLogic}, {"or", kLogic}, {"xor", kLogic},
      {"not", kUnary}, {"neg", kUnary}, {"abs", kUnary}, {"ex2", kUnary}, {"lg2", kUnary},
      {"rcp", kUnary}, {"sqrt", kUnary}, {"tanh", kUnary}, {"add", kArithmetic},
      {"sub", kArithmetic}, {"mul", kArithmetic}, {"div", kArithmetic}, {"rem", kArithmetic},
      {"min", kArithmetic}, {"max", kArithmetic}, {"shl", kArithmetic}, {"shr", kArithmetic},
      {"mad", kMad}, {"fma", kFma}, {"setp", kCompare}, {"selp", kSelect}, {"cvt", kConvert},
      {"shfl", kShuffle}, {"elect", kElect}, {"ld", kLoad}, {"st", kStore}, {"atom", kAtomic},
      {"fence", kNothing}, {"griddepcontrol", kNothing}, {"setmaxnreg", kNothing},
      {"prefetch", kNothing}, {"stmatrix", kStoreMatrix}, {"prmt", kPermute}, {"bfi", kBitInsert},
      {"ret", kNothing}, {"bra", kNothing}, {"exit", kNothing},
  };
  for (Instruction& inst : kernel.code) {
    auto found = handlers.find(inst.name);
    if (found != handlers.end()) inst.handler = found->second;
    for (const auto& m : inst.modifiers)
      if (is_type(m)) inst.type_kind = m[0], inst.type_bits = std::stoi(m.substr(1));
    if (inst.has("pred")) inst.type_bits = 1;
    if (inst.name == "mul" && inst.has("wide")) inst.handler = kWide;
    if (inst.name == "fence" && inst.has("async")) inst.handler = kFenceProxy;
    if (inst.name == "mbarrier")
      inst.handler = inst.has("init") ? kBarrierInit : inst.has("try_wait") ? kTryWait
                     : inst.has("arrive") ? kBarrierArrive : -1;
    if (inst.name == "bar" || inst.name == "barrier")
      inst.handler = inst.has("warp") ? kWarpSync : kNamed;
    if (inst.name == "cp")
      inst.handler = !inst.has("tensor") ? kNothing  // groups of stores, which are done at once
                     : inst.has("bulk_group") ? kTensorStore : kTensorLoad;
    if (inst.name == "wgmma")
      inst.handler = inst.has("mma_async") ? kProduct : inst.has("commit_group") ? kProductCommit
                     : inst.has("wait_group") ? kProductWait : kNothing;
    for (auto& list : inst.args)
      for (Operand& o : list)
        if (o.kind == Operand::kImmediate && inst.type_bits == 32) o.value = (uint32_t)o.value;
    if (inst.handler < 0)
      throw Fault("line " + std::to_string(inst.line) + ": not taken: " + inst.text);
  }
}

private:
// False: the threads wait, and the instruction is tried again.
bool execute(Warp& w, const Instruction& inst, uint32_t mask) {
  switch (inst.handler) {
    case kMov: return move(w, inst, mask);
    case kLogic: case kArithmetic: return binary(w, inst, mask);
    case kWide: case kMad: case kFma: return multiply_add(w, inst, mask);
    case kCompare: return compare(w, inst, mask);
    case kSelect: return select(w, inst, mask);
    case kConvert: return convert(w, inst, mask);
    case kUnary: return unary(w, inst, mask);
    case kShuffle: return mask == w.alive && shuffle(w, inst, mask);
    case kElect: return mask == w.alive && elect(w, inst, mask);
    case kLoad: return load_memory(w, inst, mask);
    case kStore: return store_memory(w, inst, mask);
    case kAtomic: return atomic(w, inst, mask);
    case kBarrierInit: case kBarrierArrive: return change_barrier(w, inst, mask);
    case kTryWait: return try_wait(w, inst, mask);
    case kNamed: return mask == w.alive && named_barrier(w, inst, mask);
    case kWarpSync: return mask == w.alive;
    case kFenceProxy: return fence(w);
    case kTensorLoad: case kTensorStore: return tensor_copy(w, inst, mask);
    case kProduct: return mask == w.alive && product(w, inst);
    case kProductCommit:
      w.groups.push_back(w.open.size());
      w.committed.insert(w.committed.end(), w.open.begin(), w.open.end());
      w.open.clear();
      return true;
    case kProductWait: return wait_products(w, inst);
    case kStoreMatrix: return mask == w.alive && store_matrix(w, inst);
    case kPermute: return permute(w, inst, mask);
    case kBitInsert: return bit_insert(w, inst, mask);
    default: return true;
  }
}

bool move(Warp& w, const Instruction& inst, uint32_t mask) {
  const auto &to = inst.args[0], &from = inst.args[1];
  uint64_t a[kLanes], b[kLanes];
  if (to.size() == 1 && from.size() == 1) {
    load(w, from[0], a);
    store(w, to[0], a, mask);
  } else if (from.size() > 1) {  // parts to one, the lowest first
    int bits = inst.type_bits / from.size();
    uint64_t all[kLanes] = {};
    for (size_t p = 0; p < from.size(); ++p) {
      load(w, from[p], a);
      for (int i = 0; i < kLanes; ++i) all[i] |= (a[i] & ((1ull << bits) - 1)) << (bits * p);
    }
    store(w, to[0], all, mask);
  } else {
    int bits = inst.type_bits / to.size();
    load(w, from[0], a);
    for (size_t p = 0; p < to.size(); ++p) {
      for (int i = 0; i < kLanes; ++i) b[i] = a[i] >> (bits * p) & ((1ull << bits) - 1);
      store(w, to[p], b, mask);
    }
  }
  return true;
}

static int64_t extended(uint64_t value, int bits, char kind) {
  if (bits == 64) return value;
  uint64_t cut = value & ((1ull << bits) - 1);
  if (kind == 's' && cut >> (bits - 1)) cut |= ~0ull << bits;
  return cut;
}

bool binary(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes], b[kLanes], c[kLanes];
  const std::string& n = inst.name;
  load(w, inst.args[1][0], a);
  load(w, inst.args[2][0], b);
  if (inst.type_kind == 'f') {
    if (inst.type_bits != 32) fail("a float of another width");
    float x[kLanes], y[kLanes], z[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = as_float(a[i]), y[i] = as_float(b[i]);
    for (int i = 0; i < kLanes; ++i) {
      if (n == "add") z[i] = x[i] + y[i];
      else if (n == "sub") z[i] = x[i] - y[i];
      else if (n == "mul") z[i] = x[i] * y[i];
      else if (n == "div") z[i] = x[i] / y[i];
      else if (n == "max") z[i] = std::fmax(x[i], y[i]);
      else if (n == "min") z[i] = std::fmin(x[i], y[i]);
      else fail("float operation");
    }
    for (int i = 0; i < kLanes; ++i) c[i] = as_bits(z[i]);
    store(w, inst.args[0][0], c, mask);
    return true;
  }
  int bits = inst.type_bits;
  char first = n[0], second = n[1];
  for (int i = 0; i < kLanes; ++i) {
    int64_t x = extended(a[i], bits, inst.type_kind), y = extended(b[i], bits, inst.type_kind);
    uint64_t ux = x, uy = y;
    bool is_signed = inst.type_kind == 's';
    switch (first) {
      case 'a': c[i] = n == "and" ? ux & uy : ux + uy; break;
      case 'o': c[i] = ux | uy; break;
      case 'x': c[i] = ux ^ uy; break;
      case 's':
        if (second == 'u') c[i] = ux - uy;
        else if (n == "shl") c[i] = uy >= (uint64_t)bits ? 0 : ux << uy;
        else if (is_signed) c[i] = x >> std::min<uint64_t>(b[i] & 0xffffffff, bits - 1);
        else c[i] = uy >= (uint64_t)bits ? 0 : ux >> uy;
        break;
      case 'm':
        if (n == "mul") {
          if (inst.has("hi")) c[i] = is_signed ? (uint64_t)((__int128)x * y >> bits)
                                               : (uint64_t)((unsigned __int128)ux * uy >> bits);
          else c[i] = ux * uy;
        } else {
          bool takes_x = is_signed ? (n == "max") == (x > y) : (n == "max") == (ux > uy);
          c[i] = takes_x ? ux : uy;
          if (inst.has("relu") && (int64_t)c[i] < 0) c[i] = 0;
        }
        break;
      case 'd': case 'r':
        if (y == 0) {
          if (mask >> i & 1) fail("division by zero");
          c[i] = 0;
        } else if (n == "div") {
          c[i] = is_signed ? x / y : ux / uy;
        } else {
          c[i] = is_signed ? x % y : ux % uy;
        }
        break;
      default: fail("integer operation");
    }
  }
  store(w, inst.args[0][0], c, mask);
  return true;
}

bool multiply_add(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes], b[kLanes], c[kLanes] = {};
  load(w, inst.args[1][0], a);
  load(w, inst.args[2][0], b);
  if (inst.args.size() > 3) load(w, inst.args[3][0], c);
  for (int i = 0; i < kLanes; ++i) {
    if (inst.handler == kFma) {
      c[i] = as_bits(std::fma(as_float(a[i]), as_float(b[i]), as_float(c[i])));
    } else {
      int64_t x = extended(a[i], inst.type_bits, inst.type_kind);
      int64_t y = extended(b[i], inst.type_bits, inst.type_kind);
      c[i] += (uint64_t)x * (uint64_t)y;
    }
  }
  store(w, inst.args[0][0], c, mask);
  return true;
}

bool compare(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes], b[kLanes], c[kLanes];
  load(w, inst.args[1][0], a);
  load(w, inst.args[2][0], b);
  const std::string& op = inst.modifiers[0];
  for (int i = 0; i < kLanes; ++i) {
    int order;  // -1, 0, 1; 2: unordered
    if (inst.type_kind == 'f') {
      float x = as_float(a[i]), y = as_float(b[i]);
      order = std::isnan(x) || std::isnan(y) ? 2 : x < y ? -1 : x > y;
    } else {
      int64_t x = extended(a[i], inst.type_bits, inst.type_kind);
      int64_t y = extended(b[i], inst.type_bits, inst.type_kind);
      order = inst.type_kind == 's' ? (x < y ? -1 : x > y)
                                    : ((uint64_t)x < (uint64_t)y ? -1 : (uint64_t)x > (uint64_t)y);
    }
    bool is_loose = inst.type_kind == 'f' && op.back() == 'u' && op.size() == 3;
    std::string base = is_loose ? op.substr(0, 2) : op;
    bool result = base == "lt" ? order == -1 : base == "le" ? order == -1 || order == 0
                : base == "gt" ? order == 1  : base == "ge" ? order == 0 || order == 1
                : base == "eq" ? order == 0  : base == "ne" ? order == -1 || order == 1
                                                            : (fail("comparison"), false);
    c[i] = result || (order == 2 && is_loose);
  }
  store(w, inst.args[0][0], c, mask);
  return true;
}

bool select(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes], b[kLanes];
  load(w, inst.args[1][0], a);
  load(w, inst.args[2][0], b);
  uint32_t chosen = w.predicates[inst.args[3][0].index];
  for (int i = 0; i < kLanes; ++i)
    if (!(chosen >> i & 1)) a[i] = b[i];
  store(w, inst.args[0][0], a, mask);
  return true;
}

bool unary(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes];
  load(w, inst.args[1][0], a);
  const std::string& n = inst.name;
  for (int i = 0; i < kLanes; ++i) {
    if (n == "not") a[i] = ~a[i];
    else if (inst.type_kind == 'f') {
      float x = as_float(a[i]);
      if (inst.has("ftz") && std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(0.0f, x);
      x = n == "neg" ? -x : n == "abs" ? std::fabs(x) : n == "ex2" ? std::exp2(x)
          : n == "lg2" ? std::log2(x) : n == "rcp" ? 1.0f / x : n == "sqrt" ? std::sqrt(x)
          : n == "tanh" ? std::tanh(x) : (fail("float function"), 0.0f);
      if (inst.has("ftz") && std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(0.0f, x);
      a[i] = as_bits(x);
    } else {
      int64_t x = extended(a[i], inst.type_bits, 's');
      a[i] = n == "neg" ? -x : n == "abs" ? std::llabs(x) : (fail("integer function"), 0);
    }
  }
  store(w, inst.args[0][0], a, mask);
  return true;
}

static const Format* format_of(const std::string& m) {
  if (m.rfind("e4m3", 0) == 0) return &kE4m3;
  if (m.rfind("e5m2", 0) == 0) return &kE5m2;
  if (m.rfind("bf16", 0) == 0) return &kBfloat;
  if (m.rfind("f16", 0) == 0) return &kHalf;
  return nullptr;
}

bool convert(Warp& w, const Instruction& inst, uint32_t mask) {
  const std::string &to = inst.modifiers[inst.modifiers.size() - 2], &from = inst.modifiers.back();
  const Format *narrow = format_of(to), *wide = format_of(from);
  uint64_t a[kLanes], b[kLanes], c[kLanes];
  load(w, inst.args[1][0], a);
  if (inst.args.size() > 2) load(w, inst.args[2][0], b);
  bool saturates = inst.has("satfinite");
  for (int i = 0; i < kLanes; ++i) {
    if (narrow && from == "f32" && inst.args.size() > 2) {  // the first operand goes to the top
      c[i] = (uint64_t)narrow->narrow(as_float(a[i]), saturates) << narrow->bits() |
             narrow->narrow(as_float(b[i]), saturates);
    } else if (narrow && from == "f32") {
      c[i] = narrow->narrow(as_float(a[i]), saturates);
    } else if (wide && to == "f32") {
      c[i] = as_bits(wide->widen(a[i] & ((1u << wide->bits()) - 1)));
    } else if (wide && narrow == &kHalf) {  // two of 8 bits to two halves, exactly
      c[i] = kHalf.narrow(wide->widen(a[i] & 0xff), false) |
             (uint64_t)kHalf.narrow(wide->widen(a[i] >> 8 & 0xff), false) << 16;
    } else if (is_type(to) && is_type(from) && to[0] != 'f' && from[0] != 'f') {
      c[i] = extended(a[i], std::stoi(from.substr(1)), from[0]);
    } else if (to == "f32" && is_type(from) && from != "f32") {
      int64_t x = extended(a[i], std::stoi(from.substr(1)), from[0]);
      c[i] = as_bits((float)x);
    } else {
      fail("conversion");
    }
  }
  store(w, inst.args[0][0], c, mask);
  return true;
}

bool permute(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t a[kLanes], b[kLanes], s[kLanes];
  load(w, inst.args[1][0], a);
  load(w, inst.args[2][0], b);
  load(w, inst.args[3][0], s);
  for (int i = 0; i < kLanes; ++i) {
    uint64_t both = (uint64_t)(uint32_t)b[i] << 32 | (uint32_t)a[i], result = 0;
    for (int k = 0; k < 4; ++k) {
      int code = s[i] >> (4 * k) & 15;
      uint64_t byte = both >> (8 * (code & 7)) & 0xff;
      if (code & 8) byte = byte & 0x80 ? 0xff : 0;
      result |= byte << (8 * k);
    }
    a[i] = result;
  }
  store(w, inst.args[0][0], a, mask);
  return true;
}

bool bit_insert(Warp& w, const Instruction& inst, uint32_t mask) {
  uint32_t a[kLanes], b[kLanes], at[kLanes], count[kLanes];
  uint32_t* lists[] = {a, b, at, count};
  for (int k = 0; k < 4; ++k) load32(w, inst.args[k + 1][0], lists[k]);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t field = count[i] >= 32 ? kAll : (1u << count[i]) - 1;
    b[i] = (b[i] & ~(field << at[i])) | (a[i] & field) << at[i];
  }
  store32(w, inst.args[0][0], b, mask);
  return true;
}

bool shuffle(Warp& w, const Instruction& inst, uint32_t mask) {
  // shfl.sync.MODE.b32 d, a, b, c, members
  const std::string& mode = inst.modifiers[1];
  bool has_predicate = inst.args[1][0].kind == Operand::kPredicate;
  size_t first = has_predicate ? 2 : 1;
  uint32_t a[kLanes], b[kLanes], c[kLanes], d[kLanes], inside = 0;
  load32(w, inst.args[first][0], a);
  load32(w, inst.args[first + 1][0], b);
  load32(w, inst.args[first + 2][0], c);
  for (int i = 0; i < kLanes; ++i) {
    int clamp = c[i] & 31, segment = c[i] >> 8 & 31, by = b[i] & 31;
    int highest = (i & segment) | (clamp & ~segment), lowest = i & segment, j;
    bool is_inside;
    if (mode == "up") j = i - by, is_inside = j >= highest;
    else if (mode == "down") j = i + by, is_inside = j <= highest;
    else if (mode == "bfly") j = i ^ by, is_inside = j <= highest;
    else if (mode == "idx") j = lowest | (by & ~segment), is_inside = j <= highest;
    else fail("shuffle");
    if (!is_inside) j = i;
    if (!(mask >> j & 1)) fail("a shuffle reads a thread that has left");
    d[i] = a[j];
    inside |= (uint32_t)is_inside << i;
  }
  store32(w, inst.args[0][0], d, mask);
  if (has_predicate) {
    uint32_t& p = w.predicates[inst.args[1][0].index];
    p = (p & ~mask) | (inside & mask);
  }
  return true;
}

bool elect(Warp& w, const Instruction& inst, uint32_t mask) {
  uint32_t leader[kLanes];
  std::fill(leader, leader + kLanes, __builtin_ctz(mask));
  store32(w, inst.args[0][0], leader, mask);
  w.predicates[inst.args[1][0].index] = mask & -mask;
  return true;
}

// memory

bool load_memory(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t at[kLanes], values[kLanes];
  addresses(w, inst.addresses[0], at);
  int bytes = inst.type_bits / 8;
  bool is_shared = inst.has("shared"), is_global = inst.has("global");
  size_t count = inst.args[0].size();
  for (int i = 0; i < kLanes; ++i)
    if (is_global && (mask >> i & 1) && at[i] % (bytes * count)) fail("misaligned global address");
  for (size_t k = 0; k < count; ++k) {
    for (int i = 0; i < kLanes; ++i) {
      values[i] = 0;
      if (!(mask >> i & 1)) continue;
      uint64_t address = at[i] + k * bytes;
      const void* source = is_shared   ? shared(address, bytes)
                           : is_global ? global(address, bytes)
                                       : (const void*)address;
      memcpy(&values[i], source, bytes);
      values[i] = extended(values[i], inst.type_bits, inst.type_kind);
    }
    store(w, inst.args[0][k], values, mask);
  }
  return true;
}

bool store_memory(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t at[kLanes], values[kLanes];
  addresses(w, inst.addresses[0], at);
  int bytes = inst.type_bits / 8;
  bool is_shared = inst.has("shared");
  if (!is_shared && !inst.has("global")) fail("a store to another space");
  size_t count = inst.args[0].size();
  for (size_t k = 0; k < count; ++k) {
    load(w, inst.args[0][k], values);
    for (int i = 0; i < kLanes; ++i) {
      if (!(mask >> i & 1)) continue;
      uint64_t address = at[i] + k * bytes;
      if (!is_shared && at[i] % (bytes * count)) fail("misaligned global address");
      memcpy(is_shared ? shared(address, bytes) : global(address, bytes), &values[i], bytes);
      if (is_shared) touch_generic(w, address, bytes);
    }
  }
  return true;
}

bool atomic(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t at[kLanes], operand[kLanes], old[kLanes] = {};
  addresses(w, inst.addresses[0], at);
  load(w, inst.args[1][0], operand);
  if (inst.type_bits != 32 || !inst.has("global")) fail("atomic operation");
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint8_t* target = global(at[i], 4);
    uint32_t before, after, by = operand[i];
    memcpy(&before, target, 4);
    if (inst.has("max") && inst.type_kind == 's') after = std::max((int32_t)before, (int32_t)by);
    else if (inst.has("max") && inst.type_kind == 'u') after = std::max(before, by);
    else if (inst.has("add") && inst.type_kind != 'f') after = before + by;
    else fail("atomic operation");
    memcpy(target, &after, 4);
    old[i] = before;
  }
  store(w, inst.args[0][0], old, mask);
  return true;
}

// synchronization

bool change_barrier(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t at[kLanes];
  uint32_t count[kLanes];
  addresses(w, inst.addresses[0], at);
  size_t last = inst.args.size() - 1;
  bool has_count = inst.handler == kBarrierInit || last >= 1;
  std::fill(count, count + kLanes, 1);
  if (has_count) load32(w, inst.args[last][0], count);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (inst.handler == kBarrierInit) {
      Barrier& b = barrier(at[i]);
      if (b.is_initialized) fail("the barrier is initialized twice");
      b = {count[i], count[i], 0, 0, true};
    } else if (inst.has("expect_tx")) {
      Barrier& b = initialized(at[i]);
      b.bytes += count[i];
      arrive_at(b, 1);
    } else {
      arrive_at(initialized(at[i]), count[i]);
    }
  }
  return true;
}

bool try_wait(Warp& w, const Instruction& inst, uint32_t mask) {
  uint64_t at[kLanes];
  uint32_t parity[kLanes];
  addresses(w, inst.addresses[0], at);
  load32(w, inst.args[1][0], parity);
  for (int i = 0; i < kLanes; ++i)
    if ((mask >> i & 1) && initialized(at[i]).phase == (parity[i] & 1)) return false;
  w.predicates[inst.args[0][0].index] |= mask;
  return true;
}

bool named_barrier(Warp& w, const Instruction& inst, uint32_t mask) {
  uint32_t id = scalar(w, inst.args[0][0], mask);
  uint32_t threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
  uint32_t count = inst.args.size() > 1 ? scalar(w, inst.args[1][0], mask) : threads;
  if (id > 15 || count % kLanes || count == 0) fail("named barrier");
  NamedBarrier& b = named_[id];
  if (w.barrier_turn >= 0) {
    if (b.turn == w.barrier_turn) return false;
    w.barrier_turn = -1;
    return true;
  }
  int64_t turn = b.turn;
  b.arrived += kLanes;
  has_progress_ = true;
  if (b.arrived > count) fail("more threads at a named barrier than it counts");
  if (b.arrived == count) {
    b.arrived = 0;
    ++b.turn;
    return true;
  }
  if (inst.has("arrive")) return true;
  w.barrier_turn = turn;
  return false;
}

bool fence(Warp& w) {
  for (uint32_t g : w.unfenced) is_unfenced_[g] = 0;
  w.unfenced.clear();
  return true;
}

bool tensor_copy(Warp& w, const Instruction& inst, uint32_t mask) {
  bool is_load = inst.handler == kTensorLoad;
  // a load names shared memory first, a store the map
  uint64_t first[kLanes], second[kLanes], third[kLanes];
  addresses(w, inst.addresses[0], first);
  addresses(w, inst.addresses[1], second);
  if (is_load) addresses(w, inst.addresses[2], third);
  uint32_t at[5][kLanes] = {};
  for (size_t d = 0; d < inst.coordinates.size(); ++d) load32(w, inst.coordinates[d], at[d]);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    TensorMap map = TensorMap::read((const void*)(is_load ? second[i] : first[i]));
    if (map.rank != (int)inst.coordinates.size()) fail("a tensor map of another rank");
    int64_t where[5] = {};
    for (int d = 0; d < map.rank; ++d) where[d] = (int32_t)at[d][i];
    if (is_load) start_copy(map, where, first[i], third[i]);
    else store_copy(map, where, second[i]);
  }
  return true;
}

bool store_matrix(Warp& w, const Instruction& inst) {
  // four 8 x 8 matrices: threads 8 m to 8 m + 7 hold the addresses of the rows of matrix m
  if (!inst.has("x4") || inst.has("trans")) fail("stmatrix form");
  uint64_t at[kLanes];
  addresses(w, inst.addresses[0], at);
  uint32_t values[kLanes];
  for (int m = 0; m < 4; ++m) {
    load32(w, inst.args[0][m], values);
    for (int row = 0; row < 8; ++row) {
      uint32_t address = at[8 * m + row];
      memcpy(shared(address, 16), &values[4 * row], 16);
      touch_generic(w, address, 16);
    }
  }
  return true;
}

// asynchronous products: a warp computes the 16 rows of its warpgroup's 64 that it holds

struct Matrix {  // an operand in shared memory, as its descriptor says
  uint32_t start, leading, stride;
  int span;
  bool is_transposed;  // the row dimension (M or N) is contiguous
  int element_bytes;

  // byte address of element (row, k)
  uint32_t at(uint32_t row, uint32_t k) const {
    uint32_t offset;
    if (!is_transposed) {
      offset = row / 8 * stride + row % 8 * span + k * element_bytes;
    } else {
      uint32_t wide = span / element_bytes;
      offset = row / wide * leading + row % wide * element_bytes + k / 8 * stride + k % 8 * span;
    }
    return swizzled(start + offset, span);
  }
};

Matrix matrix(uint64_t descriptor, bool is_transposed, int element_bytes) {
  Matrix m;
  m.start = (descriptor & 0x3fff) << 4;
  m.leading = (descriptor >> 16 & 0x3fff) << 4;
  m.stride = (descriptor >> 32 & 0x3fff) << 4;
  int code = descriptor >> 62;
  if (code == 0) fail("a product's operand without swizzle");
  if (descriptor >> 49 & 7) fail("a product's operand with a base offset");
  m.span = code == 1 ? 128 : code == 2 ? 64 : 32;
  m.is_transposed = is_transposed;
  m.element_bytes = element_bytes;
  return m;
}

float element(uint32_t address, const Format& format) {
  uint8_t* source = shared(address, format.bits() / 8);
  if (format.bits() == 8) return format.widen(*source);
  uint16_t code;
  memcpy(&code, source, 2);
  return &format == &kHalf ? half_to_float(code) : as_float((uint32_t)code << 16);
}

void read_matrix(const Matrix& m, const Format& format, int first_row, int rows, int depth,
                 std::vector<float>& out, Product& reads) {
  out.resize(rows * depth);
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < depth; ++k) {
      uint32_t address = m.at(first_row + row, k);
      out[row * depth + k] = element(address, format);
      uint32_t granule = (address - kSharedBase) / 16;
      if (reads.granules.empty() || reads.granules.back() != granule) {
        check_fenced(granule);
        reads.granules.push_back(granule);
      }
    }
}

bool product(Warp& w, const Instruction& inst) {
  // wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B {d}, a, b, accumulate, 1, 1 [, transposes]
  const std::string& shape = inst.modifiers[3];
  int n = std::stoi(shape.substr(shape.find('n') + 1)), depth = std::stoi(shape.substr(shape.find('k') + 1));
  const Format* format = format_of(inst.modifiers[5]);
  if (inst.modifiers[4] != "f32" || !format || inst.modifiers[5] != inst.modifiers[6])
    fail("product form");
  bool is_a_shared = inst.args[1].size() == 1;
  size_t scale = 3;
  uint32_t accumulates = w.predicates[inst.args[scale][0].index];
  if (accumulates != 0 && accumulates != kAll) fail("threads disagree on accumulation");
  size_t flags = scale + 3;  // after the signs of A and B
  bool is_b_transposed = inst.args.size() > flags && inst.args.back()[0].value == 1;
  if (is_a_shared && inst.args.size() > flags + 1 && inst.args[flags][0].value == 1)
    fail("A transposed");
  if (inst.args[scale + 1][0].value != 1 || inst.args[scale + 2][0].value != 1) fail("negation");

  Product reads;
  reads.clock = clock_;
  reads.inst = &inst;
  std::vector<float> a(16 * depth), b;
  int bytes = format->bits() / 8;
  if (is_a_shared) {
    uint64_t descriptors[kLanes];
    load(w, inst.args[1][0], descriptors);
    read_matrix(matrix(descriptors[0], false, bytes), *format, w.index % 4 * 16, 16, depth, a, reads);
  } else {
    int per = 4 / bytes;  // elements of a register
    for (int r = 0; r < 4; ++r) {
      uint32_t values[kLanes];
      load32(w, inst.args[1][r], values);
      for (int i = 0; i < kLanes; ++i)
        for (int e = 0; e < per; ++e) {
          int row = i / 4 + 8 * (r % 2), k = i % 4 * per + r / 2 * 4 * per + e;
          uint32_t code = values[i] >> (8 * bytes * e) & ((1u << 8 * bytes) - 1);
          a[row * depth + k] = format->bits() == 8 ? format->widen(code)
                               : format == &kHalf  ? half_to_float(code)
                                                   : as_float(code << 16);
        }
    }
  }
  uint64_t descriptors[kLanes];
  load(w, inst.args[2][0], descriptors);
  read_matrix(matrix(descriptors[0], is_b_transposed, bytes), *format, 0, n, depth, b, reads);

  std::vector<float> columns(depth * n), row_sum(n);
  for (int j = 0; j < n; ++j)
    for (int k = 0; k < depth; ++k) columns[k * n + j] = b[j * depth + k];
  for (int row = 0; row < 16; ++row) {
    std::fill(row_sum.begin(), row_sum.end(), 0.0f);
    for (int k = 0; k < depth; ++k) {
      float x = a[row * depth + k];
      const float* c = &columns[k * n];
      for (int j = 0; j < n; ++j) row_sum[j] += x * c[j];
    }
    for (int j = 0; j < n; ++j) {
      // register of column j in row: pairs of columns, rows 8 apart, groups of 8 columns
      int reg = j / 8 * 4 + row / 8 * 2 + j % 2, lane = row % 8 * 4 + j % 8 / 2;
      uint32_t& target = w.r32[inst.args[0][reg].index * kLanes + lane];
      target = as_bits((accumulates ? as_float(target) : 0.0f) + row_sum[j]);
    }
  }
  w.open.push_back(std::move(reads));
  return true;
}

bool wait_products(Warp& w, const Instruction& inst) {
  size_t left = inst.args[0][0].value;
  while (w.groups.size() > left) {
    size_t count = w.groups.front();
    for (size_t i = 0; i < count; ++i)
      for (uint32_t granule : w.committed[i].granules)
        if (written_[granule] > w.committed[i].clock)
          fail("shared memory was overwritten while this product read it", w.committed[i].inst);
    w.committed.erase(w.committed.begin(), w.committed.begin() + count);
    w.groups.erase(w.groups.begin());
  }
  return true;
}
