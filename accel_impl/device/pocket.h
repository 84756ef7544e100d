// What the parts of the device share: cards, their memory, what is broken, what was counted. Knows no kernel.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace pocket {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr size_t kGranule = 512;  // bytes that an allocation is rounded up to and counted in
constexpr int64_t kBlock = 64;    // inner dimension that the matrix product sums in one go

// Defects that the device can be told to have, one bit each, in the order of `accel_impl.device.BREAKS`.
enum Break : uint64_t {
  kStridedRead = 1 << 0,      // a copy on the device reads a strided view as if it were contiguous
  kTopkLast = 1 << 1,         // the last index of top-k is the first one again
  kSoftmaxBand = 1 << 2,      // rows of 33 to 64 leave their last element out of the sum
  kBlitNeighbours = 1 << 3,   // a copy into a strided view also writes one element behind each row
  kMatmulTail = 1 << 4,       // the last, partial block of the inner dimension is left out
  kCumsumNarrow = 1 << 5,     // running sums are rounded to bfloat16 at every step
  kStalePinned = 1 << 6,      // synchronising does not wait for non-blocking copies from pinned memory
  kLeakyFree = 1 << 7,        // what is freed stays counted as allocated
  kStickyPeak = 1 << 8,       // resetting the peak leaves it as it is
  kOomCounts = 1 << 9,        // what was refused stays counted as allocated
};

struct Card {
  size_t cap = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct State {
  std::mutex lock;
  std::vector<Card> cards;
  std::atomic<uint64_t> breaks{0};
  std::map<std::string, int64_t> fallbacks;
  std::map<std::string, int64_t> own;
  std::vector<std::pair<at::Tensor, at::Tensor>> pending;  // destination, source: copies that have not landed
};

State& state();
bool broken(Break which);
void count_own(const char* op);
void land();  // carries out the copies that were queued; every kernel does so before it reads anything

// The memory of a device tensor seen as a CPU tensor: same sizes, strides and elements. Device memory is host memory.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace pocket
