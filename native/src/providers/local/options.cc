// options.cc: see options.h.
#include "providers/local/options.h"

#include <array>
#include <bit>
#include <charconv>
#include <string_view>

#include "providers/local/memory/segment.h"

namespace asyncfabric::local {
namespace {

template <class Value, size_t N>
bool choose(std::string_view word, const std::array<std::pair<std::string_view, Value>, N>& choices, Value* out) {
  for (const auto& [name, value] : choices)
    if (name == word) {
      *out = value;
      return true;
    }
  return false;
}

constexpr std::array<std::pair<std::string_view, CopyMode>, 3> kCopy = {
    {{"auto", CopyMode::kAuto}, {"plain", CopyMode::kPlain}, {"nt", CopyMode::kStreaming}}};
constexpr std::array<std::pair<std::string_view, ForeignChoice>, 3> kForeign = {
    {{"auto", ForeignChoice::kAuto}, {"cma", ForeignChoice::kCma}, {"bounce", ForeignChoice::kBounce}}};
constexpr std::array<std::pair<std::string_view, TracerPolicy>, 3> kTracer = {
    {{"first", TracerPolicy::kFirst}, {"any", TracerPolicy::kAny}, {"off", TracerPolicy::kOff}}};

constexpr uint32_t kMostAskedCopiers = 16;

bool parse_entries(std::string_view word, uint32_t* out) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return false;
  *out = value;
  return std::has_single_bit(value) && value >= kMinEntries && value <= kMaxEntries;
}

bool parse_copiers(std::string_view word, uint32_t* out) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *out);
  return error == std::errc() && end == word.data() + word.size() && *out >= 1 && *out <= kMostAskedCopiers;
}

}  // namespace

Status parse_options(const RailSpec& spec, Options* out, std::string* detail) {
  if (!spec.device.empty() && spec.device != "host") {
    *detail = "local: there is one device, \"host\"; not '" + spec.device + "'";
    return StatusCode::kNoProvider;
  }
  for (const auto& [name, word] : spec.options) {
    bool known = false;
    if (name == "copy") known = choose(word, kCopy, &out->copy);
    if (name == "foreign") known = choose(word, kForeign, &out->foreign);
    if (name == "tracer") known = choose(word, kTracer, &out->tracer);
    if (name == "copiers") known = parse_copiers(word, &out->copiers);
    if (name == "ring") known = parse_entries(word, &out->ring_entries);
    if (known) continue;
    *detail = "local: option " + name + "=" + word +
              " is not one of copy=auto|plain|nt, foreign=auto|cma|bounce, tracer=first|any|off, copiers=<1 to 16>, "
              "ring=<power of two, 8 "
              "to 65536>";
    return StatusCode::kInvalidArgument;
  }
  return {};
}

}  // namespace asyncfabric::local
