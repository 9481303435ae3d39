// A plan's launch without Python: checks an argument frame, orders the addresses as the kernel
// wants them, calls the kernel's compiled entry. What a frame holds is said in prepared.py, which
// makes a Launch from a plan; callers in C++ find the same in cudnn_frost/launch.h.
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::String;

constexpr int64_t kAbsent = -1;

struct Slot {
  std::string label;
  bool is_bound;       // the plan reads or writes it
  int64_t alignment;   // bytes
};

// The kernel's address list: for each place a frame slot, or kAbsent for an absent operand.
struct Plan {
  Function entry;
  std::vector<Any> constants;
  std::vector<Slot> slots;
  std::vector<int64_t> order;
  int64_t workspace_place;
  int64_t workspace_bytes;
  Slot workspace;
  int64_t version;
  int64_t features;
  int64_t device;
};

int64_t CurrentDevice() {
  using GetDevice = int (*)(int*);
  static const GetDevice get = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return driver ? reinterpret_cast<GetDevice>(dlsym(driver, "cuCtxGetDevice")) : nullptr;
  }();
  int device = 0;
  // a thread without a context gets the primary one of whoever launches first
  return get && get(&device) == 0 ? device : kAbsent;
}

int64_t Integer(const AnyView& value, const char* what) {
  if (auto number = value.try_cast<int64_t>()) return *number;
  TVM_FFI_THROW(TypeError) << what << ": expected an integer, got " << value.GetTypeKey();
}

int64_t Address(const AnyView& value, const std::string& label) {
  if (value == nullptr) return 0;
  if (auto pointer = value.try_cast<void*>()) return reinterpret_cast<int64_t>(*pointer);
  if (auto number = value.try_cast<int64_t>()) return *number;
  TVM_FFI_THROW(TypeError) << label << ": expected an address, got " << value.GetTypeKey();
}

void CheckSlot(const Slot& slot, int64_t address) {
  if (!slot.is_bound && address != 0) {
    TVM_FFI_THROW(ValueError) << slot.label << ": is no operand of this plan, pass null";
  }
  if (slot.is_bound && address == 0) {
    TVM_FFI_THROW(ValueError) << slot.label << ": is null, the plan needs it";
  }
  if (slot.is_bound && address % slot.alignment) {
    TVM_FFI_THROW(ValueError) << slot.label << ": address " << reinterpret_cast<void*>(address)
                              << " is not " << slot.alignment << "-byte aligned";
  }
}

void CheckDevice(const Plan& plan) {
  const int64_t device = CurrentDevice();
  if (plan.device != kAbsent && device != kAbsent && device != plan.device) {
    TVM_FFI_THROW(ValueError) << "device: the plan was built for cuda:" << plan.device
                              << ", the current device is cuda:" << device;
  }
}

// bound: an address for every slot of the version
void Launch(const Plan& plan, const std::vector<int64_t>& bound, int64_t workspace,
            int64_t stream) {
  for (size_t place = 0; place < bound.size(); ++place) CheckSlot(plan.slots[place], bound[place]);
  if (plan.workspace_bytes != 0) CheckSlot(plan.workspace, workspace);
  CheckDevice(plan);
  std::vector<Any> addresses(plan.order.size(), Any(int64_t{0}));
  for (size_t place = 0; place < plan.order.size(); ++place) {
    if (plan.order[place] != kAbsent) addresses[place] = bound[plan.order[place]];
  }
  if (plan.workspace_place != kAbsent) addresses[plan.workspace_place] = workspace;
  const Array<Any> pointers(addresses.begin(), addresses.end());
  std::vector<AnyView> call;
  call.reserve(plan.constants.size() + 2);
  call.emplace_back(pointers);
  call.insert(call.end(), plan.constants.begin(), plan.constants.end());
  call.emplace_back(stream);
  Any ignored;
  plan.entry.CallPacked(call.data(), static_cast<int32_t>(call.size()), &ignored);
}

// (version, known features, every slot of the version, workspace, its bytes, stream)
struct FrameLaunch {
  Plan plan;

  void operator()(const AnyView* args, int32_t count, Any*) const {
    const int32_t slots = static_cast<int32_t>(plan.slots.size());
    const int64_t version = count > 0 ? Integer(args[0], "schema version") : 0;
    if (version != plan.version) {
      TVM_FFI_THROW(ValueError) << "schema version: the plan's is " << plan.version << ", got "
                                << version;
    }
    if (count != slots + 5) {
      TVM_FFI_THROW(TypeError) << "frame: version " << version << " has " << slots + 5
                               << " arguments, got " << count;
    }
    const int64_t unknown = plan.features & ~Integer(args[1], "known features");
    if (unknown != 0) {
      TVM_FFI_THROW(ValueError) << "known features: the plan has features " << unknown
                                << " that the caller does not know";
    }
    std::vector<int64_t> bound(slots);
    for (int32_t place = 0; place < slots; ++place) {
      bound[place] = Address(args[place + 2], plan.slots[place].label);
    }
    const int64_t bytes = Integer(args[slots + 3], "workspace bytes");
    if (bytes < plan.workspace_bytes) {
      TVM_FFI_THROW(ValueError) << "workspace: has " << bytes << " bytes, the plan needs "
                                << plan.workspace_bytes;
    }
    Launch(plan, bound, Address(args[slots + 2], "workspace"), Address(args[slots + 4], "stream"));
  }
};

// (addresses of the plan's own slots in their order, workspace, stream)
struct OrderedLaunch {
  Plan plan;
  std::vector<int64_t> places;

  void operator()(const AnyView* args, int32_t count, Any*) const {
    if (count != 3) TVM_FFI_THROW(TypeError) << "launch: has 3 arguments, got " << count;
    const auto given = args[0].cast<Array<Any>>();
    if (given.size() != places.size()) {
      TVM_FFI_THROW(ValueError) << "pointers: the plan has " << places.size() << " slots, got "
                                << given.size();
    }
    std::vector<int64_t> bound(plan.slots.size(), 0);
    for (size_t i = 0; i < places.size(); ++i) {
      bound[places[i]] = Address(given[i], plan.slots[places[i]].label);
    }
    Launch(plan, bound, Address(args[1], "workspace"), Address(args[2], "stream"));
  }
};

// entry, constants, labels of the version's slots, alignment of each (0: not the plan's), the
// kernel's address list, and (workspace place, bytes, alignment, version, features, device)
Array<Function> Prepare(Function entry, Array<Any> constants, Array<String> labels,
                        Array<int64_t> alignments, Array<int64_t> order, Array<int64_t> numbers) {
  Plan plan;
  plan.entry = entry;
  plan.constants = {constants.begin(), constants.end()};
  plan.order = {order.begin(), order.end()};
  plan.workspace_place = numbers[0];
  plan.workspace_bytes = numbers[1];
  plan.workspace = {"workspace", true, numbers[2]};
  plan.version = numbers[3];
  plan.features = numbers[4];
  plan.device = numbers[5];
  std::vector<int64_t> places;
  for (size_t place = 0; place < labels.size(); ++place) {
    const int64_t alignment = alignments[place];
    if (alignment != 0) places.push_back(static_cast<int64_t>(place));
    plan.slots.push_back({labels[place], alignment != 0, alignment});
  }
  return {Function::FromPacked(FrameLaunch{plan}),
          Function::FromPacked(OrderedLaunch{plan, places})};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, Prepare)
