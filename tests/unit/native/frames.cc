// A caller of prepared launches in C++, and a kernel entry that counts: no Python on either side.
#include <cudnn_frost/launch.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <array>
#include <atomic>
#include <thread>

namespace {

using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;

std::atomic<int64_t> entered{0};
std::atomic<int64_t> failed{0};

Function CountingEntry() {
  return Function::FromPacked([](const AnyView*, int32_t, tvm::ffi::Any*) { ++entered; });
}

int64_t CounterAddress() { return reinterpret_cast<int64_t>(&entered); }

int64_t FailureAddress() { return reinterpret_cast<int64_t>(&failed); }

// Steady state on a thread of its own, Q, K, V and O bound, everything else null.
void Steady(Function frame, Array<int64_t> qkvo, int64_t launches) {
  std::thread([=] {
    using namespace cudnn_frost;
    std::array<AnyView, kNumArguments> arguments{};
    arguments[kVersion] = kSchemaVersion;
    arguments[kKnownFeatures] = int64_t{0};
    const int places[] = {kQSlot, kKSlot, kVSlot, kOSlot};
    for (int i = 0; i < 4; ++i) arguments[places[i]] = reinterpret_cast<void*>(qkvo[i]);
    arguments[kWorkspaceBytes] = int64_t{0};
    arguments[kStream] = static_cast<void*>(nullptr);
    tvm::ffi::Any ignored;
    for (int64_t i = 0; i < launches; ++i) {
      try {
        frame.CallPacked(arguments.data(), kNumArguments, &ignored);
      } catch (const tvm::ffi::Error&) {
        ++failed;
      }
    }
  }).detach();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(counting_entry, CountingEntry)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counter_address, CounterAddress)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(failure_address, FailureAddress)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(steady, Steady)
