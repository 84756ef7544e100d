// The device: what torch asks of a backend, in one translation unit. Everything else an operator needs is a fallback to
// the CPU, which is counted. `accel_impl/device/__init__.py` builds and names it.
#include "pocket.h"

#include "memory.h"
//
#include "kernels.h"

#include <ATen/NativeFunctions.h>

namespace pocket {

State& state() {
  static auto* held = new State;  // never destroyed: tensors may outlive the library's own statics
  return *held;
}

bool broken(Break which) { return state().breaks.load(std::memory_order_relaxed) & which; }

void count_own(const char* op) {
  std::lock_guard<std::mutex> guard(state().lock);
  state().own[op] += 1;
}

void land() {
  std::vector<std::pair<at::Tensor, at::Tensor>> queued;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    queued.swap(state().pending);
  }
  for (auto& [to, from] : queued) on_host(to).copy_(from);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  return at::from_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());  // a tensor grows on its own card
  return at::native::resize_(self, sizes, format);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  land();
  return on_host(tensor).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

// Operators that take host tensors beside device tensors on every accelerator: indices, and what moves data itself.
bool mixes(const std::string& name) {
  static const std::set<std::string> known = {
      "aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::index_put.out",
      "aten::index.Tensor_out", "aten::_pin_memory", "aten::equal"};
  return known.count(name) > 0;
}

void one_card(const std::string& name, const at::Tensor& tensor, std::optional<at::Device>& seen) {
  if (!tensor.defined() || tensor.dim() == 0) return;
  if (seen && *seen != tensor.device() && !mixes(name)) {
    TORCH_CHECK(false, name, ": expected all tensors on one device, found ", *seen, " and ", tensor.device());
  }
  seen = tensor.device();
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  land();
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  std::optional<at::Device> seen;
  for (const auto& value : torch::jit::last(stack, schema.arguments().size())) {
    if (value.isTensor()) one_card(name, value.toTensor(), seen);
    if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) one_card(name, each, seen);
    }
  }
  {
    std::lock_guard<std::mutex> guard(state().lock);
    state().fallbacks[name] += 1;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("cat", &cat);
  m.impl("mm", &mm);
  m.impl("bmm", &bmm);
  m.impl("addmm", &addmm);
  m.impl("baddbmm", &baddbmm);
  m.impl("_softmax", &softmax);
  m.impl("topk", &topk);
  m.impl("cumsum", &cumsum);
  m.impl("histc", &histc);
  m.impl("native_layer_norm", &layer_norm);
  m.impl("convolution_overrideable", &convolution);
}

std::string told(const std::map<std::string, int64_t>& counts) {
  std::string text;
  for (const auto& [name, count] : counts) text += name + " " + std::to_string(count) + "\n";
  return text;
}

}  // namespace pocket

// What Python asks, by name.
extern "C" {

void pocket_cards(int count, uint64_t cap_bytes) {
  auto& state = pocket::state();
  std::lock_guard<std::mutex> guard(state.lock);
  state.cards.resize(count);
  for (auto& card : state.cards) card.cap = cap_bytes;
}

void pocket_cap(int card, uint64_t cap_bytes) {
  auto& state = pocket::state();
  std::lock_guard<std::mutex> guard(state.lock);
  state.cards.at(card).cap = cap_bytes;
}

int pocket_count() { return static_cast<int>(pocket::state().cards.size()); }

void pocket_break(uint64_t bits) { pocket::state().breaks = bits; }

void pocket_reset_counts() {
  auto& state = pocket::state();
  std::lock_guard<std::mutex> guard(state.lock);
  state.fallbacks.clear();
  state.own.clear();
}

// Lines "operator count"; the text stands until the next call from the same thread.
const char* pocket_counts(int fallbacks) {
  static thread_local std::string text;
  auto& state = pocket::state();
  std::lock_guard<std::mutex> guard(state.lock);
  text = pocket::told(fallbacks ? state.fallbacks : state.own);
  return text.c_str();
}
}
