// Launches of a plan without Python.
//
// Prepared launches check an argument frame, order its addresses as the kernel wants them and call
// the kernel's compiled entry. What a frame holds is said in prepared.py; callers in C++ find the
// same in cudnn_frost/launch.h.
//
// Recognizing launches are the steady state of `execute`: they launch when every buffer looks as
// one that Python's checks have passed, and otherwise leave the call to those checks.
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::String;

constexpr int64_t kAbsent = -1;
constexpr int kNoContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

struct Slot {
  std::string label;
  bool is_bound;       // the plan reads or writes it
  int64_t alignment;   // bytes
};

// A compiled kernel and what never changes about its call: entry(addresses, constants..., stream).
struct Kernel {
  Function entry;
  std::vector<Any> constants;

  void Enqueue(const std::vector<Any>& addresses, int64_t stream) const {
    const Array<Any> pointers(addresses.begin(), addresses.end());
    std::vector<AnyView> call;
    call.reserve(constants.size() + 2);
    call.emplace_back(pointers);
    call.insert(call.end(), constants.begin(), constants.end());
    call.emplace_back(stream);
    Any ignored;
    entry.CallPacked(call.data(), static_cast<int32_t>(call.size()), &ignored);
  }
};

// order: for each of the kernel's addresses the slot of the frame, or kAbsent.
struct Plan {
  Kernel kernel;
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
  const int status = get ? get(&device) : kNoContext;
  if (status == 0) return device;
  // a thread without a context launches on the first device
  return get && status == kNoContext ? 0 : kAbsent;
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
  plan.kernel.Enqueue(addresses, stream);
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
  plan.kernel = {entry, {constants.begin(), constants.end()}};
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

// What a tensor looks like, its address aside.
struct Geometry {
  DLDataType dtype;
  DLDevice device;
  int32_t ndim;
  std::vector<int64_t> extents;  // shape, then strides where the tensor states them

  explicit Geometry(const DLTensor& x) : dtype(x.dtype), device(x.device), ndim(x.ndim) {
    extents.assign(x.shape, x.shape + x.ndim);
    if (x.strides) extents.insert(extents.end(), x.strides, x.strides + x.ndim);
  }

  bool IsOf(const DLTensor& x) const {
    const size_t stated = static_cast<size_t>(x.ndim) * (x.strides ? 2 : 1);
    return dtype.code == x.dtype.code && dtype.bits == x.dtype.bits &&
           dtype.lanes == x.dtype.lanes && device.device_type == x.device.device_type &&
           device.device_id == x.device.device_id && ndim == x.ndim &&
           extents.size() == stated &&
           std::equal(x.shape, x.shape + x.ndim, extents.begin()) &&
           (!x.strides ||
            std::equal(x.strides, x.strides + x.ndim, extents.begin() + x.ndim));
  }
};

// Of each buffer of a call; none for one that was an address.
using Passed = std::vector<std::optional<Geometry>>;

struct Recognized {
  Kernel kernel;
  std::vector<int64_t> places;      // the kernel's address that each buffer is
  std::vector<int64_t> alignments;  // of each buffer, bytes
  size_t num_addresses;
  // swapped whole, so that threads share it
  std::shared_ptr<const Passed> passed = std::make_shared<const Passed>();

  // (buffers..., stream): launches and answers true, or false when a buffer was never passed
  bool Launch(const AnyView* args, int32_t count) const {
    const auto known = std::atomic_load(&passed);
    if (known->size() != places.size() || count != static_cast<int32_t>(places.size()) + 1) {
      return false;
    }
    std::vector<Any> addresses(num_addresses, Any(int64_t{0}));
    for (size_t i = 0; i < places.size(); ++i) {
      int64_t address = 0;
      if (auto tensor = args[i].try_cast<DLTensor*>()) {
        if (!(*known)[i] || !(*known)[i]->IsOf(**tensor)) return false;
        address = reinterpret_cast<int64_t>((*tensor)->data) +
                  static_cast<int64_t>((*tensor)->byte_offset);
      } else if (auto number = args[i].try_cast<int64_t>()) {
        address = *number;
      }
      if (address == 0 || address % alignments[i]) return false;
      addresses[places[i]] = address;
    }
    kernel.Enqueue(addresses, Address(args[count - 1], "stream"));
    return true;
  }

  void Remember(const AnyView* args, int32_t count) {
    Passed found;
    for (int32_t i = 0; i < count; ++i) {
      auto tensor = args[i].try_cast<DLTensor*>();
      found.push_back(tensor ? std::optional<Geometry>(**tensor) : std::nullopt);
    }
    std::atomic_store(&passed, std::make_shared<const Passed>(std::move(found)));
  }
};

// The launching function and the one that is told of a call that passed.
Array<Function> Recognize(Function entry, Array<Any> constants, Array<int64_t> places,
                          Array<int64_t> alignments, int64_t num_addresses) {
  auto shared = std::make_shared<Recognized>();
  shared->kernel = {entry, {constants.begin(), constants.end()}};
  shared->places = {places.begin(), places.end()};
  shared->alignments = {alignments.begin(), alignments.end()};
  shared->num_addresses = static_cast<size_t>(num_addresses);
  return {Function::FromPacked([shared](const AnyView* args, int32_t count, Any* launched) {
            *launched = shared->Launch(args, count);
          }),
          Function::FromPacked([shared](const AnyView* args, int32_t count, Any*) {
            shared->Remember(args, count);
          })};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, Prepare)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(recognize, Recognize)
