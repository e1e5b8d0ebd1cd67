// finding.h: the input that is under way, and what writes it to a file when the process ends over it: by a sanitizer, an abort, an
// exception that nobody caught, or more time than an input may take.
#pragma once

#include <string>
#include <string_view>

namespace asyncfabric::fuzz {

constexpr unsigned kMostSeconds = 10;  // of the processor, for one input: a loaded machine makes none slower

// Findings go to files in `folder`, which is there.
void watch_findings(const std::string& folder, const std::string& program);
// The view stays valid until the next call.
void begin_input(const char* target, std::string_view bytes);

}  // namespace asyncfabric::fuzz
