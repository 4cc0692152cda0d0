// A device that calls itself CUDA and computes on the CPU, for tests on machines without a GPU.
#include <ATen/DeviceAccelerator.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstring>
#include <map>
#include <set>
#include <string>

namespace {

thread_local int inside = 0;  // > 0 while the fallback itself moves data
struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};
std::map<std::string, long> reads, uploads, operators;
long allocated = 0, peak = 0, allocations = 0, held_at_start = 0;
bool counting = false;

void note(std::map<std::string, long>& where, const std::string& what) {
  if (counting) ++where[what];
}

// The size stands in front of each block.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    *reinterpret_cast<size_t*>(block) = bytes;
    allocated += bytes;
    ++allocations;
    peak = std::max(peak, allocated);
    return {block + 64, block, &Allocator::free_block, c10::Device(c10::kCUDA, 0)};
  }
  static void free_block(void* block) {
    allocated -= *static_cast<size_t*>(block);
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::free_block; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
Allocator allocator;

// The same memory, called a CPU tensor.
at::Tensor on_cpu(const at::Tensor& t) {
  c10::Storage storage = t.storage();
  auto alias = at::from_blob(storage.mutable_data(), {static_cast<int64_t>(storage.nbytes())},
                             [storage](void*) {}, at::TensorOptions().dtype(at::kByte));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(alias.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  result.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::kFloat), format);
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  if (!inside && dst.is_cpu()) note(reads, "copy to the host");
  if (!inside && self.is_cpu()) note(uploads, "copy to the device");
  Inside guard;
  auto to = dst.is_cpu() ? dst : on_cpu(dst);
  to.copy_(self.is_cpu() ? self : on_cpu(self));
  return dst;
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_from(src.expand_as(self), self, non_blocking);
  return self;
}
at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!inside) note(reads, "item");
  return on_cpu(self).item();
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (impl->storage_offset() + impl->numel()) * self.dtype().itemsize();
  if (bytes > self.storage().nbytes()) {
    auto data = allocator.allocate(bytes);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr(std::move(data));
    self.storage().set_nbytes(bytes);
  }
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_storage(self, none, 0, {0}, {1});
}

// A generator of this device, which lets a CPU generator draw.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator drawing)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(std::move(drawing)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(host.clone()); }
  at::Generator host;
};

// Operators for which CUDA's own kernels wait: the host needs a value, or the size of the result.
const std::set<std::string> waiting = {
    "aten::nonzero",    "aten::equal",      "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim", "aten::is_nonzero", "aten::unique_consecutive",
};

bool is_mask(const c10::IValue& index) {
  if (!index.isTensor() || !index.toTensor().defined()) return false;
  const auto type = index.toTensor().scalar_type();
  return type == at::kBool || type == at::kByte;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  note(operators, name);
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  if (waiting.count(name)) note(reads, name);
  if (name == "aten::repeat_interleave" && arguments.size() > 1 && arguments[1].isNone()) note(reads, name);
  if (name == "aten::index")
    for (const auto& index : arguments[1].toListRef())
      if (is_mask(index)) {
        note(reads, "index by a mask");
        break;
      }
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i)
    if ((*stack)[i].isGenerator() && (*stack)[i].toGenerator().device().is_cuda())
      (*stack)[i] = static_cast<Generator*>((*stack)[i].toGenerator().unsafeGetGeneratorImpl())->host;
  Inside guard;
  at::native::cpu_fallback(op, stack);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(static_type, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(at::kCUDA, 0); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<Generator>(at::detail::getDefaultCPUGenerator());
    return generator;
  }
  std::string showConfig() const override { return "simulated"; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The CPU build answers "none"; this library is loaded first, so that its answer counts.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
}

// Plain C for ctypes: counts of what a stretch of code did.
extern "C" {
void simulated_start() {
  reads.clear();
  uploads.clear();
  operators.clear();
  allocations = 0;
  held_at_start = peak = allocated;
  counting = true;
}
void simulated_stop() { counting = false; }
const char* simulated_counts(int which) {
  static thread_local std::string text;
  text.clear();
  for (const auto& [what, n] : which == 0 ? reads : which == 1 ? uploads : operators)
    text += what + "\t" + std::to_string(n) + "\n";
  return text.c_str();
}
long simulated_peak_bytes() { return peak - held_at_start; }
long simulated_allocations() { return allocations; }
}
