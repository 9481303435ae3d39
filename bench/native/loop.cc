// Times a tvm-ffi function called over and over from C++.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <chrono>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;

// Seconds of one call, the mean of `calls`.
double Loop(Function function, Array<Any> arguments, int64_t calls) {
  const std::vector<AnyView> views(arguments.begin(), arguments.end());
  Any ignored;
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    function.CallPacked(views.data(), static_cast<int32_t>(views.size()), &ignored);
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  return spent.count() / static_cast<double>(calls);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(loop, Loop)
