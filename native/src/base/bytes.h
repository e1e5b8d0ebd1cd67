// bytes.h: bounded reading of bytes that may be hostile, and the writer that matches it. Little endian, no alignment.
// A reader that ran over its end stays failed; check ok() once at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace asyncfabric {

class ByteWriter {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <class Length>
  void put_string(std::string_view text) {
    put(static_cast<Length>(text.size()));
    out_.append(text);
  }
  void put_raw(std::string_view text) { out_.append(text); }
  std::string& text() { return out_; }

 private:
  std::string out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view in) : in_(in) {}

  template <class T>
  T get() {
    static_assert(std::is_integral_v<T>);
    T value{};
    if (in_.size() < sizeof value) {
      ok_ = false;
      in_ = {};
      return value;
    }
    std::memcpy(&value, in_.data(), sizeof value);
    in_.remove_prefix(sizeof value);
    return value;
  }
  template <class Length>
  std::string_view get_string() {
    const size_t length = get<Length>();
    if (in_.size() < length) {
      ok_ = false;
      in_ = {};
      return {};
    }
    const std::string_view text = in_.substr(0, length);
    in_.remove_prefix(length);
    return text;
  }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && in_.empty(); }
  std::string_view rest() const { return in_; }

 private:
  std::string_view in_;
  bool ok_ = true;
};

// FNV-1a: finds truncation and bit flips, no protection against forgery.
inline uint64_t checksum(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

}  // namespace asyncfabric
