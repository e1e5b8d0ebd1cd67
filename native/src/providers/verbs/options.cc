// options.cc: see options.h.
#include "providers/verbs/options.h"

#include <array>
#include <bit>
#include <charconv>
#include <string_view>

namespace asyncfabric::verbs {
namespace {

struct Number {
  std::string_view name;
  uint32_t least = 0;
  uint32_t most = 0;
  uint32_t Options::* field = nullptr;
};

constexpr std::array kNumbers = {
    Number{"port", 1, 255, &Options::port},
    Number{"mtu", 256, 4096, &Options::mtu},
    Number{"pkey", 0, 65535, &Options::pkey},
    Number{"traffic_class", 0, 255, &Options::traffic_class},
    Number{"service_level", 0, 15, &Options::service_level},
    Number{"timeout", 0, 31, &Options::timeout},
    Number{"retry", 0, 7, &Options::retry},
    Number{"rnr_retry", 0, 7, &Options::rnr_retry},
    Number{"qps", 1, 2, &Options::qps},
    Number{"depth", 16, 16384, &Options::depth},
    Number{"receives", 4, 16384, &Options::receives},
    Number{"chain", 1, 64, &Options::chain},
    Number{"silence", 100, 3'600'000, &Options::silence_ms},
};

bool parse_number(std::string_view word, uint32_t least, uint32_t most, uint32_t* out) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *out);
  return error == std::errc() && end == word.data() + word.size() && *out >= least && *out <= most;
}

std::string known_options() {
  std::string text = "library=<file>, gid=<index, address or interface>, relaxed_ordering=0|1";
  for (const Number& number : kNumbers)
    text += ", " + std::string(number.name) + "=" + std::to_string(number.least) + ".." + std::to_string(number.most);
  return text;
}

}  // namespace

Status parse_options(const RailSpec& spec, Options* out, std::string* detail) {
  out->device = spec.device;
  for (const auto& [name, word] : spec.options) {
    bool known = false;
    uint32_t value = 0;
    if (name == "library") {
      out->library = word;
      known = true;
    } else if (name == "gid") {
      known = parse_gid_wish(word, &out->gid);
    } else if (name == "relaxed_ordering") {
      known = parse_number(word, 0, 1, &value);
      out->relaxed_ordering = value != 0;
    }
    for (const Number& number : kNumbers)
      if (name == number.name) known = parse_number(word, number.least, number.most, &(out->*number.field));
    if (name == "mtu" && !std::has_single_bit(out->mtu)) known = false;
    if (known) continue;
    *detail = "verbs: option " + name + "=" + word + " is not one of " + known_options();
    return StatusCode::kInvalidArgument;
  }
  return {};
}

}  // namespace asyncfabric::verbs
