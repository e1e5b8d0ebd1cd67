// fault_plan.cc: options of a fault rail to a FaultPlan; a malformed number is refused, never guessed.
#include "providers/fault/fault_plan.h"

#include <charconv>
#include <string_view>

namespace asyncfabric {

namespace {

constexpr std::string_view kPrefix = "fault+";

uint64_t* find_field(FaultPlan* plan, std::string_view option) {
#define X(name, field, fallback) \
  if (option == name) return &plan->field;
  ASYNCFABRIC_FAULT_OPTIONS(X)
#undef X
  return nullptr;
}

}  // namespace

std::string fault_option_names() {
  std::string names;
#define X(option, field, fallback) names += names.empty() ? option : ", " option;
  ASYNCFABRIC_FAULT_OPTIONS(X)
#undef X
  return names;
}

Status parse_fault_spec(const RailSpec& spec, FaultPlan* plan, RailSpec* inner, std::string* detail) {
  if (!spec.provider.starts_with(kPrefix) || spec.provider.size() == kPrefix.size()) {
    *detail = "a fault rail is named fault+<provider>, got '" + spec.provider + "'";
    return StatusCode::kInvalidArgument;
  }
  inner->provider = spec.provider.substr(kPrefix.size());
  inner->device = spec.device;
  inner->options.clear();
  for (const auto& [option, value] : spec.options) {
    uint64_t* field = find_field(plan, option);
    if (field == nullptr) {
      inner->options.emplace_back(option, value);
      continue;
    }
    const char* end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, *field);
    if (error != std::errc() || stop != end || value.empty()) {
      *detail = "fault option " + option + " must be an unsigned number, got '" + value + "'";
      return StatusCode::kInvalidArgument;
    }
  }
  return {};
}

}  // namespace asyncfabric
