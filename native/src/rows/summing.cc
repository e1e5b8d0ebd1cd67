// summing.cc: what summing.h promises. Whole stripes are added where they lie; what a run leaves over waits for the next one.
#include "asyncfabric/summing.h"

#include <algorithm>
#include <cstring>

#include "rows/kernels.h"
#include "rows/walk.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {
namespace {

constexpr size_t kStepBytes = 8192;  // as many are asked for while so many are added

// Whether the processor sees what comes within a run. Asking for it costs a Zen 5 a tenth of its speed, and gives a Xeon of the fourth
// generation, in a virtual machine, two fifths more.
bool sees_ahead() {
#if defined(__x86_64__)
  static const bool sees = __builtin_cpu_is("amd");
  return sees;
#else
  return true;
#endif
}

// The sum of bytes that come in parts; how many they are in all is reported first.
class Stream {
 public:
  Stream(const Kernels& kernels, size_t bytes)
      : kernels_(kernels), bytes_(bytes), stripes_((bytes - 1) / xxh3::kStripe) {}  // the last one is not among them

  void add(const uint8_t* data, size_t length, const uint8_t* next) {
    note_last(data, length);
    if (held_ != 0) {
      const size_t taken = std::min(xxh3::kStripe - held_, length);
      std::memcpy(buffer_ + held_, data, taken);
      held_ += taken;
      data += taken;
      length -= taken;
      if (held_ < xxh3::kStripe || summed_ == stripes_) return;
      sum(buffer_, 1, next);
      held_ = 0;
    }
    const size_t ready = std::min(length / xxh3::kStripe, stripes_ - summed_);
    sum(data, ready, next);
    held_ = length - ready * xxh3::kStripe;
    std::memcpy(buffer_, data + ready * xxh3::kStripe, held_);
  }

  uint64_t finish() { return lanes_.finish(last_, bytes_); }

 private:
  void sum(const uint8_t* data, size_t count, const uint8_t* next) {
    kernels_.stripes(lanes_.sums, data, count, summed_ % xxh3::kStripesOfBlock, next);
    summed_ += count;
  }

  void note_last(const uint8_t* data, size_t length) {
    const size_t taken = std::min(length, xxh3::kStripe), kept = xxh3::kStripe - taken;
    std::memmove(last_, last_ + taken, kept);
    std::memcpy(last_ + kept, data + length - taken, taken);
  }

  const Kernels& kernels_;
  const size_t bytes_, stripes_;
  xxh3::Lanes lanes_;
  size_t summed_ = 0, held_ = 0;
  uint8_t buffer_[xxh3::kStripe], last_[xxh3::kStripe] = {};
};

size_t bytes_of(const Runs& runs) {
  size_t bytes = 0, reach = 0;
  runs.measure(&bytes, &reach);
  return bytes;
}

// Of a stretch, without where it lies.
Runs runs_of(const BoxTable& table, size_t stretch) {
  const auto begin = static_cast<size_t>(table.dimensions[stretch]);
  const auto count = static_cast<size_t>(table.dimensions[stretch + 1]) - begin;
  return {nullptr, table.sizes.subspan(begin, count), table.strides.subspan(begin, count),
          static_cast<size_t>(table.run_bytes[stretch])};
}

// From 0 to `end`, and never back.
bool climbs(std::span<const int64_t> begins, size_t end) {
  return !begins.empty() && begins.front() == 0 && begins.back() == static_cast<int64_t>(end) &&
         std::is_sorted(begins.begin(), begins.end());
}

}  // namespace

bool BoxTable::measure(size_t* memory_bytes) const {
  constexpr size_t kMost = size_t{1} << 57;
  *memory_bytes = 0;
  if (!climbs(stretches, at.size()) || at.size() != run_bytes.size() || dimensions.size() != at.size() + 1 ||
      !climbs(dimensions, sizes.size()) || sizes.size() != strides.size())
    return false;
  for (size_t box = 0; box + 1 < stretches.size(); ++box) {
    size_t all = 0;
    for (auto stretch = static_cast<size_t>(stretches[box]); stretch < static_cast<size_t>(stretches[box + 1]);
         ++stretch) {
      size_t bytes = 0, reach = 0;
      if (run_bytes[stretch] <= 0 || !runs_of(*this, stretch).measure(&bytes, &reach)) return false;
      if (at[stretch] < 0 || static_cast<size_t>(at[stretch]) > kMost) return false;
      *memory_bytes = std::max(*memory_bytes, static_cast<size_t>(at[stretch]) + reach);
      all += bytes;
    }
    if (all < kLeastSummedBytes) return false;
  }
  return true;
}

bool sum_boxes(const uint8_t* memory, const BoxTable& table, std::span<const int64_t> numbers,
               std::span<uint64_t> sums) {
  const auto boxes = static_cast<int64_t>(table.stretches.size()) - 1;
  const auto known = [&](int64_t number) { return number >= 0 && number < boxes; };
  if (numbers.size() != sums.size() || !std::all_of(numbers.begin(), numbers.end(), known)) return false;
  const Kernels& kernels = best_kernels();
  for (size_t place = 0; place < numbers.size(); ++place) {
    const auto first = static_cast<size_t>(table.stretches[static_cast<size_t>(numbers[place])]);
    const auto end = static_cast<size_t>(table.stretches[static_cast<size_t>(numbers[place]) + 1]);
    size_t bytes = 0;
    for (size_t stretch = first; stretch < end; ++stretch) bytes += bytes_of(runs_of(table, stretch));
    Stream stream(kernels, bytes);
    for (size_t stretch = first; stretch < end; ++stretch) {
      Runs runs = runs_of(table, stretch);
      runs.data = memory + table.at[stretch];
      Walk walk(runs, kStepBytes);
      for (size_t left = bytes_of(runs); left != 0;) {
        const uint8_t* data = walk.data();
        const size_t length = walk.length();
        walk.next();
        const bool asks = walk.length() >= length && (walk.data() != data + length || !sees_ahead());
        stream.add(data, length, asks ? walk.data() : data);
        left -= length;
      }
    }
    sums[place] = stream.finish();
  }
  return true;
}

uint64_t sum_words(std::span<const uint8_t> bytes, uint32_t place) {
  const Kernels& kernels = best_kernels();
  const size_t count = bytes.size() / 4, left = bytes.size() % 4;
  const uint64_t whole = kernels.sum_words(bytes.data(), count, place);
  if (left == 0) return whole;
  uint8_t last[4] = {};
  std::memcpy(last, bytes.data() + 4 * count, left);
  return whole + kernels.sum_words(last, 1, place + static_cast<uint32_t>(count));
}

}  // namespace asyncfabric::rows
