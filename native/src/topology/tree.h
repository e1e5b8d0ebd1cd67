// tree.h: reading a tree of small files that may be odd: missing, empty, unreadable, huge, half unplugged.
// Everything is relative to one root folder. Absence is an empty value here, never an error: the rooms above decide.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace asyncfabric::topology {

class Tree {
 public:
  explicit Tree(std::string root);

  // The first 64 KiB of a file without white space at its ends; "" when it cannot be read.
  std::string text(std::string_view path) const;
  std::optional<int64_t> number(
      std::string_view path) const;  // decimal, or hexadecimal after 0x; nothing else behind it
  std::vector<std::string> names(std::string_view folder) const;  // in natural order: mlx5_2 before mlx5_10
  bool exists(std::string_view path) const;
  // Where a link finally leads, relative to the root; "" when it leads nowhere or out of the root.
  std::string resolved(std::string_view path) const;
  std::string link_name(std::string_view path) const;  // the last part of what a link holds, also when it leads nowhere

 private:
  std::string root_;  // canonical, without a slash at its end
};

std::string_view trimmed(std::string_view text);
bool natural_less(std::string_view one, std::string_view other);
std::optional<int64_t> parse_number(std::string_view text);

// "0-3,8,10-11" as in cpulist files; out of bounds or malformed parts are left out.
std::vector<uint32_t> parse_list(std::string_view text);
std::vector<std::string_view> split(std::string_view text, char separator);  // empty parts are left out

}  // namespace asyncfabric::topology
