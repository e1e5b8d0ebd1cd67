// tree.cc: see tree.h.
#include "topology/tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "base/unique_fd.h"

namespace asyncfabric::topology {
namespace {

constexpr size_t kMostBytes = 64 * 1024;  // a cpulist of the largest machines is a few KiB
constexpr uint32_t kMostCpus = 1 << 16;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string real_path(const std::string& path) {
  std::unique_ptr<char, decltype(&std::free)> found(realpath(path.c_str(), nullptr), std::free);
  return found ? std::string(found.get()) : std::string();
}

}  // namespace

Tree::Tree(std::string root) : root_(real_path(root)) {
  if (root_ == "/") root_.clear();
  if (root_.empty() && real_path(root) != "/") root_ = root;  // does not exist: every read fails on its own
}

std::string Tree::text(std::string_view path) const {
  const std::string file = root_ + "/" + std::string(path);
  // Not blocking, and only plain files: a copied tree may hold a FIFO or a device node, and reading those could wait for ever.
  const UniqueFd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat kind{};
  if (!fd || fstat(fd.get(), &kind) != 0 || !S_ISREG(kind.st_mode)) return {};
  std::string out;
  char buffer[4096];
  while (out.size() < kMostBytes) {
    const ssize_t got = read(fd.get(), buffer, sizeof buffer);  // ENODEV from an unplugged device ends here too
    if (got <= 0) break;
    out.append(buffer, static_cast<size_t>(got));
  }
  return std::string(trimmed(out));
}

std::optional<int64_t> Tree::number(std::string_view path) const { return parse_number(text(path)); }

std::vector<std::string> Tree::names(std::string_view folder) const {
  std::vector<std::string> out;
  const std::string path = root_ + "/" + std::string(folder);
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(path.c_str()), closedir);
  if (directory == nullptr) return out;
  while (const dirent* entry = readdir(directory.get()))
    if (entry->d_name[0] != '.') out.emplace_back(entry->d_name);
  std::sort(out.begin(), out.end(), natural_less);
  return out;
}

bool Tree::exists(std::string_view path) const { return access((root_ + "/" + std::string(path)).c_str(), F_OK) == 0; }

std::string Tree::resolved(std::string_view path) const {
  const std::string found = real_path(root_ + "/" + std::string(path));
  if (!found.starts_with(root_ + "/")) return {};
  return found.substr(root_.size() + 1);
}

std::string Tree::link_name(std::string_view path) const {
  char target[4096];
  const ssize_t length = readlink((root_ + "/" + std::string(path)).c_str(), target, sizeof target);
  if (length <= 0) return {};
  const std::string_view text(target, static_cast<size_t>(length));
  return std::string(text.substr(text.rfind('/') + 1));
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace(" \t\r\n\0", 5);  // device-tree-like attributes end with a zero
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// Runs of digits compare as numbers; equal numbers written differently ("07", "7") fall back to the plain order.
bool natural_less(std::string_view one, std::string_view other) {
  size_t i = 0;
  size_t j = 0;
  while (i < one.size() && j < other.size()) {
    if (!is_digit(one[i]) || !is_digit(other[j])) {
      if (one[i] != other[j]) return one[i] < other[j];
      ++i;
      ++j;
      continue;
    }
    size_t end = i;
    size_t other_end = j;
    while (end < one.size() && is_digit(one[end])) ++end;
    while (other_end < other.size() && is_digit(other[other_end])) ++other_end;
    std::string_view number = one.substr(i, end - i);
    std::string_view other_number = other.substr(j, other_end - j);
    number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
    other_number.remove_prefix(std::min(other_number.find_first_not_of('0'), other_number.size()));
    if (number.size() != other_number.size()) return number.size() < other_number.size();
    if (number != other_number) return number < other_number;
    i = end;
    j = other_end;
  }
  const size_t left = one.size() - i;
  const size_t other_left = other.size() - j;
  return left != other_left ? left < other_left : one < other;
}

std::optional<int64_t> parse_number(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const bool hexadecimal = text.starts_with("0x");
  if (hexadecimal) text.remove_prefix(2);
  if (text.empty() || text.size() > 15) return std::nullopt;  // 15 digits fit whatever the base
  int64_t value = 0;
  for (const char c : text) {
    int digit = 0;
    if (is_digit(c))
      digit = c - '0';
    else if (hexadecimal && ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')))
      digit = (c | 0x20) - 'a' + 10;
    else
      return std::nullopt;
    value = value * (hexadecimal ? 16 : 10) + digit;
  }
  return negative ? -value : value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::vector<uint32_t> parse_list(std::string_view text) {
  std::vector<uint32_t> out;
  for (const std::string_view part : split(text, ',')) {
    const size_t dash = part.find('-', 1);
    const std::optional<int64_t> first = parse_number(trimmed(part.substr(0, dash)));
    const std::optional<int64_t> last =
        dash == std::string_view::npos ? first : parse_number(trimmed(part.substr(dash + 1)));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostCpus) continue;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) out.push_back(static_cast<uint32_t>(cpu));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace asyncfabric::topology
