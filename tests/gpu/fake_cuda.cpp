// What autograd asks of CUDA, for a build of torch without it: one device, one stream, and nothing to wait for.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

namespace {

using namespace c10;

const Device DEVICE(DeviceType::CUDA, 0);
const Stream STREAM(Stream::DEFAULT, DEVICE);

std::mutex lock;
std::set<const void*> pinned;  // where blocks of "pinned" memory begin: plain memory, remembered

void release(void* block) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(block);
  }
  GetCPUAllocator()->raw_deallocate(block);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* block = GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(block);
    return {block, block, &release, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct FakeCudaGuard final : impl::DeviceGuardImplInterface {
  FakeCudaGuard() = default;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return STREAM; }
  Stream getDefaultStream(Device) const override { return STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return STREAM; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)
}

namespace at::fake {

// torch looks for hooks of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void* place) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(place) > 0;
  }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at::fake
