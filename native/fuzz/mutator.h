// mutator.h: makes inputs of inputs: bits, bytes, numbers at the edges of their types, cuts, copies, and pieces of other inputs.
// Pure but for its own state; the same seed makes the same inputs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace asyncfabric::fuzz {

class Mutator {
 public:
  Mutator(uint64_t seed, size_t most_bytes) : random_(seed), most_bytes_(most_bytes) {}

  // One to eight changes of `bytes`; `others` is not empty.
  void change(std::string* bytes, const std::vector<std::string>& others) {
    for (size_t left = size_t{1} << below(4); left != 0; --left) change_once(bytes, others);
    if (bytes->size() > most_bytes_) bytes->resize(most_bytes_);
  }
  size_t below(size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(random_() % bound); }

 private:
  void change_once(std::string* bytes, const std::vector<std::string>& others) {
    const size_t size = bytes->size(), at = below(size + 1);
    switch (below(9)) {
      case 0:
        if (at < size) (*bytes)[at] = static_cast<char>((*bytes)[at] ^ 1 << below(8));
        break;
      case 1:
        if (at < size) (*bytes)[at] = static_cast<char>(random_());
        break;
      case 2: put_number(bytes, at); break;
      case 3: bytes->resize(at); break;
      case 4: bytes->erase(at, 1 + below(16)); break;
      case 5: bytes->insert(at, 1 + below(16), static_cast<char>(random_())); break;
      case 6: bytes->insert(at, *bytes, below(size + 1), 1 + below(64)); break;
      case 7: {
        const std::string& other = others[below(others.size())];
        bytes->replace(at, below(32), other, below(other.size() + 1), below(64));
        break;
      }
      default: add_to_byte(bytes, at); break;
    }
  }
  void put_number(std::string* bytes, size_t at) {
    constexpr std::array<uint64_t, 16> kEdges = {0,          1,          2,      0x7f,       0x80,       0xff,
                                                 0x7fff,     0x8000,     0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                                 1ull << 62, 1ull << 63, ~1ull,  ~0ull};
    const uint64_t value = kEdges[below(kEdges.size())];
    const size_t wanted = size_t{1} << below(4), room = bytes->size() - at;
    std::memcpy(bytes->data() + at, &value, std::min(wanted, room));
  }
  void add_to_byte(std::string* bytes, size_t at) {
    if (at < bytes->size()) (*bytes)[at] = static_cast<char>((*bytes)[at] + static_cast<int>(below(35)) - 17);
  }

  std::mt19937_64 random_;
  size_t most_bytes_;
};

}  // namespace asyncfabric::fuzz
