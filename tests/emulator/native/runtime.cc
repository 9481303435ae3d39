// In place of the CUDA runtime under a compiled kernel's host code: a launch runs on the CPU.
//
// The host code of a kernel is the real one: it checks and packs its arguments and writes the tensor
// maps. It loads its image through the functions below, which pair it with the PTX text that
// emulator_program named last.

#include <memory>
#include <mutex>
#include <string>

#include "machine.h"

namespace {

using emulator::Kernel;

struct Library {
  std::map<std::string, Kernel> kernels;
};

std::mutex mutex;
std::string program;
std::vector<emulator::Range> memory;
uint64_t seed = 0;
std::string error;
std::vector<std::unique_ptr<Library>> libraries;

struct LaunchConfig {  // cudaLaunchConfig_t
  uint32_t grid[3], block[3];
  size_t shared_bytes;
  void* stream;
  void* attributes;
  uint32_t num_attributes;
};

constexpr int kInvalid = 1, kLaunchFailure = 719, kMaxShared = 232448;

}  // namespace

extern "C" {

void emulator_program(const char* ptx) { program = ptx; }

// count pairs of first address and bytes: what kernels may touch
void emulator_memory(const uint64_t* pairs, int count) {
  memory.clear();
  for (int i = 0; i < count; ++i) memory.push_back({pairs[2 * i], pairs[2 * i] + pairs[2 * i + 1]});
}

void emulator_seed(uint64_t value) { seed = value; }

// what the last launches found, empty for nothing; asking clears it
const char* emulator_error() {
  static std::string given;
  given.swap(error);
  error.clear();
  return given.c_str();
}

int _cudaLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  try {
    auto made = std::make_unique<Library>();
    made->kernels = emulator::Parser(program).parse();
    for (auto& [name, kernel] : made->kernels) emulator::Machine::resolve(kernel);
    *library = made.get();
    libraries.push_back(std::move(made));
    return 0;
  } catch (const std::exception& fault) {
    error = fault.what();
    return kInvalid;
  }
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  auto& kernels = ((Library*)library)->kernels;
  auto found = kernels.find(name);
  if (found == kernels.end()) {
    error = std::string("the PTX has no kernel ") + name;
    return kInvalid;
  }
  *kernel = &found->second;
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int, int) {
  *value = kMaxShared;
  return 0;
}

int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}

int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }

int _cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!error.empty()) return kLaunchFailure;
  emulator::Launch launch{(const Kernel*)kernel, {}, {}, (uint32_t)config->shared_bytes, arguments};
  std::copy(config->grid, config->grid + 3, launch.grid);
  std::copy(config->block, config->block + 3, launch.block);
  try {
    emulator::Machine(launch, memory, seed).run();
    return 0;
  } catch (const std::exception& fault) {
    error = fault.what();
    return kLaunchFailure;
  }
}

int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int),
                                   void*) {
  std::lock_guard<std::mutex> guard(mutex);
  if (*library) return 0;
  void* made = nullptr;
  int status = init(&made);
  if (status == 0 && load) status = load(&made, 0);
  if (status == 0) *library = made;
  return status;
}

void cuda_dialect_unload_library_once(void**) {}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);

void CuteDSLRT_TVMFFISetRaisedCudaError(int) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.c_str());
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.c_str());
}
}
