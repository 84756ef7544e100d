// Cards and their memory: allocation against a cap, counted; streams and events, in order. Knows no kernel.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <set>

#include "pocket.h"

namespace pocket {

thread_local c10::DeviceIndex current_card = 0;
thread_local std::vector<c10::StreamId> current_stream;

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex card;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(state().lock);
    auto& stats = state().cards[block->card].stats;
    if (!broken(kLeakyFree)) stats.allocated_bytes[0].decrease(block->bytes);
    stats.reserved_bytes[0].decrease(block->bytes);
    stats.active_bytes[0].decrease(block->bytes);
    stats.allocation[0].decrease(1);
  }
  std::free(block->data);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const auto card = current_card;
    const c10::Device device(kType, card);
    if (wanted == 0) return {nullptr, nullptr, &release_nothing, device};
    const size_t bytes = rounded(wanted);
    {
      std::lock_guard<std::mutex> guard(state().lock);
      auto& held = state().cards.at(card);
      auto& stats = held.stats;
      const auto used = static_cast<size_t>(stats.allocated_bytes[0].current);
      if (used + bytes > held.cap) {
        stats.num_ooms += 1;
        if (broken(kOomCounts)) stats.allocated_bytes[0].increase(kGranule);
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "pocket:", static_cast<int>(card), " is out of memory: ", bytes,
            " bytes were asked for, the card holds ", held.cap, " bytes, of which ", used, " are allocated (at most ",
            stats.allocated_bytes[0].peak, " so far)");
      }
      stats.allocated_bytes[0].increase(bytes);
      stats.reserved_bytes[0].increase(bytes);
      stats.active_bytes[0].increase(bytes);
      stats.requested_bytes[0].increase(wanted);
      stats.allocation[0].increase(1);
    }
    // one granule more than is counted: a kernel that writes behind a tensor damages nobody else's memory
    void* data = std::aligned_alloc(kGranule, bytes + kGranule);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the host has no ", bytes, " bytes for pocket:", int(card));
    return {data, new Block{data, bytes, card}, &release, device};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex card) override {
    std::lock_guard<std::mutex> guard(state().lock);
    return state().cards.at(card).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex card) override {
    each(card, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex card) override {
    if (!broken(kStickyPeak)) each(card, [](auto& stat) { stat.reset_peak(); });
  }
  // Not marked as an override: older versions of the interface have no such member.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex card) {
    std::lock_guard<std::mutex> guard(state().lock);
    const auto& held = state().cards.at(card);
    return {held.cap - static_cast<size_t>(held.stats.allocated_bytes[0].current), held.cap};
  }
  template <typename F>
  void each(c10::DeviceIndex card, F apply) {
    std::lock_guard<std::mutex> guard(state().lock);
    auto& stats = state().cards.at(card).stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes,
                       &stats.allocation}) {
      apply((*stat)[0]);
    }
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// Page-locked host memory: host memory whose addresses are known.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &Memory::release_nothing, c10::Device(c10::DeviceType::CPU)};
    void* data = std::aligned_alloc(kGranule, rounded(bytes));
    TORCH_CHECK(data != nullptr, "the host has no ", bytes, " bytes to pin");
    std::lock_guard<std::mutex> guard(lock);
    blocks[data] = bytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = blocks.upper_bound(const_cast<void*>(data));
    if (after == blocks.begin()) return false;
    auto [begin, bytes] = *std::prev(after);
    return static_cast<const char*>(data) < static_cast<const char*>(begin) + bytes;
  }
  std::mutex lock;
  std::map<void*, size_t> blocks;
};

Pinned pinned;

void Pinned::unpin(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned.lock);
    pinned.blocks.erase(data);
  }
  std::free(data);
}

// Work is done when it is called, so streams are ordered by nature. Only copies from pinned memory are late.
void synchronise() {
  if (!broken(kStalePinned)) land();
}

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current_card;
    setDevice(device);
    return {kType, before};
  }
  c10::Device getDevice() const override { return {kType, current_card}; }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < deviceCount(), "pocket:", int(device.index()), " is not there; there are ",
                int(deviceCount()), " cards");
    current_card = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_card = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(state().cards.size());
  }
  static c10::StreamId& slot(c10::DeviceIndex card) {
    current_stream.resize(state().cards.size(), 0);
    return current_stream.at(card < 0 ? current_card : card);
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    const auto card = device.index() < 0 ? current_card : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, card), id);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, slot(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return stream(device, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    slot(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return state().pending.empty(); }
  void synchronizeStream(const c10::Stream&) const override { synchronise(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronise(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return state().pending.empty(); }
  void synchronizeEvent(void*) const override { synchronise(); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before the time between them is asked for");
    const auto span = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(state().cards.size()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_card; }
  void setCurrentDevice(c10::DeviceIndex card) const override { Guard().setDevice({kType, card}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    return Guard().exchangeDevice({kType, card}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchangeDevice(card); }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  // Random numbers are drawn by the CPU, which the fallback of every such operator runs on.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());  // a storage grows on its own card
    at::native::resize_bytes_nocuda(storage, bytes);
  }
};

Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace pocket
