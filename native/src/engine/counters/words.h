// words.h: host words that GPU kernels and streams reach at their own address: watch words, which kernels store, and counter flags,
// which the lock's holder stores and kernels or streams wait for. One block of pages, shared with each rail once, when the engine starts.
// A word stands alone on its cache line. Any thread.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace asyncfabric {

class SharedWords {
 public:
  static constexpr uint32_t kWatchWords = 256;
  static constexpr uint32_t kFlagWords = 256;
  static constexpr uint64_t kReleased =
      ~0ull >> 1;  // what a flag holds when its counter is closed: nobody waits for ever

  SharedWords() {
    void* pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();  // an engine is being made: not the data path
    words_ = static_cast<Word*>(pages);
    for (uint32_t i = kFlagWords; i > 0; --i) free_.push_back(kWatchWords + i - 1);
  }
  ~SharedWords() { munmap(words_, kBytes); }
  SharedWords(const SharedWords&) = delete;
  SharedWords& operator=(const SharedWords&) = delete;

  void* base() const { return words_; }
  uint64_t bytes() const { return kBytes; }
  uint64_t* watch(uint32_t slot) const { return &words_[slot].value; }

  // Null: all are in use. A word that was given back is taken again as late as possible: a stream may not have looked yet.
  uint64_t* take_flag() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    uint64_t* flag = &words_[free_.front()].value;
    free_.erase(free_.begin());
    std::atomic_ref(*flag).store(0, std::memory_order_relaxed);
    return flag;
  }
  // Lets go whoever waits for the flag. It is nobody else's until it is given back, when no one can raise it any more.
  static void release(uint64_t* flag) { std::atomic_ref(*flag).store(kReleased, std::memory_order_release); }
  void give_back(uint64_t* flag) {
    const std::lock_guard lock(mutex_);
    free_.push_back(static_cast<uint32_t>(reinterpret_cast<Word*>(flag) - words_));
  }

 private:
  struct alignas(64) Word {
    uint64_t value;
  };
  static constexpr uint64_t kBytes = (kWatchWords + kFlagWords) * sizeof(Word);

  Word* words_;
  std::mutex mutex_;
  std::vector<uint32_t> free_;
};

}  // namespace asyncfabric
