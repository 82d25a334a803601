// A device "mock" in host memory, for torch's key of devices from outside (PrivateUse1).
//
// It is as strict as a GPU: tensors of two devices do not mix, .numpy() is refused, and random numbers come from a
// generator of its own. Kernels are the CPU's, so that results equal the CPU's to the bit. It counts operators launched
// and values read by the host.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

constexpr auto MOCK = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---- Memory: the device's own, and pinned memory of the host.

template <class Place>
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? std::malloc(bytes) : nullptr;
    Place::taken(at);
    return {at, at, &release, c10::Device(Place::type, Place::type == MOCK ? 0 : -1)};
  }
  static void release(void* at) {
    Place::released(at);
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct OnDevice {
  static constexpr auto type = MOCK;
  static void taken(void*) {}
  static void released(void*) {}
};

struct Pinned {
  static constexpr auto type = c10::DeviceType::CPU;
  static inline std::mutex lock;
  static inline std::set<const void*> blocks;
  static void taken(void* at) {
    std::lock_guard<std::mutex> guard(lock);
    blocks.insert(at);
  }
  static void released(void* at) {
    std::lock_guard<std::mutex> guard(lock);
    blocks.erase(at);
  }
  static bool has(const void* at) {
    std::lock_guard<std::mutex> guard(lock);
    return at && blocks.count(at);
  }
};

Memory<OnDevice> memory;
Memory<Pinned> pinned_memory;
REGISTER_ALLOCATOR(MOCK, &memory);

// ---- The device: one, without streams, whose random numbers have a state of their own.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = MOCK;
  c10::DeviceType type() const override { return MOCK; }
  c10::Device exchangeDevice(c10::Device) const override { return {MOCK, 0}; }
  c10::Device getDevice() const override { return {MOCK, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {MOCK, 0}); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream({MOCK, 0}); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return {MOCK, 0}; }
  bool isPinnedPtr(const void* at) const override { return Pinned::has(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

at::Generator generator = at::detail::createCPUGenerator(0);

// ---- Tensors: made, viewed and copied.

int64_t launches = 0, reads = 0, elements_read = 0;
bool within_an_operator = false;
bool has_float64 = true;  // Apple's GPUs have none

at::Tensor on_host(const at::Tensor& x) {  // the same memory, seen as a CPU tensor
  return x.device().type() == MOCK ? at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU))
                                   : x;
}

void read(int64_t elements) {
  if (within_an_operator) return;
  ++reads;
  elements_read += elements;
}

using Layout = std::optional<at::Layout>;
using Type = std::optional<at::ScalarType>;
using Where = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;

at::ScalarType supported(Type type) {
  const auto found = c10::dtype_or_default(type);
  TORCH_CHECK_TYPE(has_float64 || found != at::kDouble, "Cannot convert a mock Tensor to float64 dtype");
  return found;
}

at::Tensor empty(c10::IntArrayRef sizes, Type type, Layout, Where, std::optional<bool>, Format format) {
  return at::detail::empty_generic(sizes, &memory, KEYS, supported(type), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, Type type, Layout, Where, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory, KEYS, supported(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.device().type() != MOCK) read(from.numel());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& x) {
  read(1);
  return on_host(x).item();
}

at::Tensor as_strided(
    const at::Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(x, sizes, strides, offset);
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef sizes, Format) {
  at::native::resize_impl_cpu_(x.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(sizes), std::nullopt);
  return x;
}

at::Tensor& set(at::Tensor& x, at::Storage from, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::set_(x, from, offset, sizes, strides);
}

at::Tensor& set_whole(at::Tensor& x, at::Storage from) {
  const int64_t length = from.nbytes() / x.itemsize();
  return at::cpu::set_(x, std::move(from), 0, {length}, {1});
}

at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef sizes) { return at::cpu::view_symint(x, sizes); }

at::Tensor reshape_alias(const at::Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::cpu::_reshape_alias_symint(x, sizes, strides);
}

at::Tensor unfold(const at::Tensor& x, int64_t dimension, int64_t size, int64_t step) {
  return at::cpu::unfold(x, dimension, size, step);
}

// ---- Convolutions, which torch asks a device for by these names.

at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  ++launches;
  const auto b = bias && bias->defined() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution(
             on_host(x), on_host(weight), b, stride, padding, dilation, transposed, output_padding, groups)
      .to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& delta, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  ++launches;
  const std::vector<int64_t> biases{delta.size(1)};
  const auto [dx, dweight, dbias] = at::convolution_backward(
      on_host(delta), on_host(x), on_host(weight), biases, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  const auto placed = [&](const at::Tensor& y) { return y.defined() ? y.to(x.device()) : y; };
  return {placed(dx), placed(dweight), placed(dbias)};
}

// ---- Every other operator: refused where a GPU would refuse it, else the CPU's kernel.

void refuse_mixed(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  const auto where = [&](const at::Tensor& x) {
    TORCH_CHECK(!x.defined() || x.device().type() == MOCK,
                "Expected all tensors to be on the same device, but found at least two devices, mock:0 and ",
                x.device(), "! (", op.schema().name(), ")");
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[first + i];
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      const auto& x = value.toTensor();
      if (x.defined() && (x.dim() || written)) where(x);  // a number from the host may be read, as on a GPU
    } else if (value.isTensorList()) {
      for (const auto& x : value.toTensorVector()) where(x);
    } else if (value.isGenerator()) {  // and lists with indices, Tensor?[], may be the host's
      TORCH_CHECK(false, "Expected a 'mock' device type for generator but found '", value.toGenerator().device(), "'");
    }
  }
}

void swap_random() {
  at::Generator host = at::detail::getDefaultCPUGenerator();  // a handle
  const auto state = host.get_state();
  host.set_state(generator.get_state());
  generator.set_state(state);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_mixed(op, *stack);
  ++launches;
  if (!op.schema().returns().empty() && op.schema().returns()[0].type()->kind() == c10::TypeKind::BoolType) read(1);
  struct Within {
    const bool outer = within_an_operator, draws;
    explicit Within(bool draws) : draws(draws) {
      within_an_operator = true;
      if (draws) swap_random();
    }
    ~Within() {
      if (draws) swap_random();
      within_an_operator = outer;
    }
  } within(op.hasTag(at::Tag::nondeterministic_seeded));
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("as_strided", &as_strided);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());  // its .out warns of a resize
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macro's name for the library
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

TORCH_LIBRARY(mock_device, library) {
  library.def("register() -> ()", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  library.def("counts() -> int[]", [] { return std::vector<int64_t>{launches, reads, elements_read}; });
  library.def("seed(int seed) -> ()", [](int64_t seed) { generator.set_current_seed(seed); });
  library.def("set_has_float64(bool value) -> ()", [](bool value) { has_float64 = value; });
  library.def("random_state() -> Tensor", [] { return generator.get_state(); });
  library.def("set_random_state(Tensor state) -> ()", [](const at::Tensor& state) { generator.set_state(state); });
}
