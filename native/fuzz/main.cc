// main.cc: fuzzes the native decoders, one after the other, each for its share of the time, and prints how many inputs each took.
//   decoders [--seconds S] [--seed N] [--corpus FOLDER] [--findings FOLDER] [TARGET...]
//   decoders --run TARGET FILE...      repeats findings
//   decoders --write-corpus FOLDER     the first inputs, made by the encoders
// Ends with 0 when no input did harm. The planted target runs only where it is named: it shows that the harness finds.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/clock.h"
#include "coverage.h"
#include "finding.h"
#include "mutator.h"
#include "target.h"

namespace asyncfabric::fuzz {
namespace {

constexpr size_t kMostBytes = 20'000;  // more than any message is
constexpr size_t kMostKept = 4096;
constexpr uint64_t kSecond = 1'000'000'000;
namespace fs = std::filesystem;

struct Options {
  double seconds = 60;
  uint64_t seed = 0;
  std::string corpus, findings = "build/fuzz", program;
  std::vector<std::string> targets;
};

std::vector<Target> all_targets() {
  std::vector<Target> all = engine_targets();
  for (auto* more : {provider_targets, local_targets, planted_target})
    for (const Target& target : more()) all.push_back(target);
  return all;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes get memory of exactly their length, so that reading over their end is seen.
void run_once(const Target& target, const std::string& bytes) {
  char* exact = static_cast<char*>(std::malloc(bytes.size()));
  if (!bytes.empty()) std::memcpy(exact, bytes.data(), bytes.size());
  begin_input(target.name, {exact, bytes.size()});
  target.run({exact, bytes.size()});
  begin_input(nullptr, {});
  std::free(exact);
}

std::vector<std::string> first_inputs(const Target& target, const Options& options) {
  std::vector<std::string> inputs = target.seeds();
  const fs::path folder = fs::path(options.corpus) / target.name;
  if (!options.corpus.empty() && fs::is_directory(folder))
    for (const auto& entry : fs::directory_iterator(folder)) inputs.push_back(text_of(entry.path()));
  return inputs;
}

uint64_t fuzz(const Target& target, const Options& options, double seconds) {
  forget_blocks();
  Mutator mutator(options.seed, kMostBytes);
  std::vector<std::string> kept = first_inputs(target, options);
  for (const std::string& input : kept) run_once(target, input);
  const uint64_t began = now_ns(), until = began + static_cast<uint64_t>(seconds * kSecond);
  uint64_t executions = kept.size(), blocks = blocks_seen();
  for (uint64_t now = began; now < until; now = now_ns()) {
    for (int i = 0; i < 64; ++i, ++executions) {
      std::string input = kept[mutator.below(kept.size())];
      mutator.change(&input, kept);
      if (target.repair != nullptr && mutator.below(8) != 0) target.repair(&input);
      run_once(target, input);
      if (blocks_seen() == blocks) continue;
      blocks = blocks_seen();
      if (kept.size() < kMostKept) kept.push_back(std::move(input));
    }
  }
  std::printf("fuzz native %-22s %11lu executions %5lu blocks %5zu inputs %6.1f s\n", target.name,
              static_cast<unsigned long>(executions), static_cast<unsigned long>(blocks), kept.size(),
              static_cast<double>(now_ns() - began) / kSecond);
  std::fflush(stdout);
  return executions;
}

int write_corpus(const fs::path& folder) {
  for (const Target& target : all_targets()) {
    if (std::strcmp(target.name, "planted") == 0) continue;
    fs::create_directories(folder / target.name);
    size_t number = 0;
    for (const std::string& seed : target.seeds())
      std::ofstream(folder / target.name / (std::to_string(number++) + ".bin"), std::ios::binary) << seed;
  }
  return 0;
}

int repeat(const std::vector<std::string>& words, const Options& options) {
  if (words.size() < 2) return 2;
  watch_findings(options.findings, options.program);
  for (const Target& target : all_targets())
    if (words[0] == target.name)
      for (size_t i = 1; i < words.size(); ++i) run_once(target, text_of(words[i]));
  return 0;
}

int fuzz_all(const Options& options) {
  std::vector<Target> chosen;
  for (const Target& target : all_targets()) {
    const bool named = std::find(options.targets.begin(), options.targets.end(), target.name) != options.targets.end();
    if (named || (options.targets.empty() && std::strcmp(target.name, "planted") != 0)) chosen.push_back(target);
  }
  if (chosen.empty() || (!options.targets.empty() && chosen.size() != options.targets.size())) {
    std::fprintf(stderr, "fuzz: no such target; there are:");
    for (const Target& target : all_targets()) std::fprintf(stderr, " %s", target.name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  fs::create_directories(options.findings);
  watch_findings(options.findings, options.program);
  uint64_t executions = 0;
  for (const Target& target : chosen)
    executions += fuzz(target, options, options.seconds / static_cast<double>(chosen.size()));
  std::printf("fuzz native, all: %lu executions of %zu targets, seed %lu\n", static_cast<unsigned long>(executions),
              chosen.size(), static_cast<unsigned long>(options.seed));
  return 0;
}

int run(const std::vector<std::string>& words) {
  Options options;
  options.program = words[0];
  options.seed = now_ns();
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--run") return repeat({words.begin() + static_cast<ptrdiff_t>(i) + 1, words.end()}, options);
    if (word.rfind("--", 0) != 0) {
      options.targets.push_back(word);
      continue;
    }
    if (++i == words.size()) return 2;
    if (word == "--seconds")
      options.seconds = std::atof(words[i].c_str());
    else if (word == "--seed")
      options.seed = std::strtoull(words[i].c_str(), nullptr, 10);
    else if (word == "--corpus")
      options.corpus = words[i];
    else if (word == "--findings")
      options.findings = words[i];
    else if (word == "--write-corpus")
      return write_corpus(words[i]);
    else
      return 2;
  }
  return fuzz_all(options);
}

}  // namespace
}  // namespace asyncfabric::fuzz

int main(int count, char** words) { return asyncfabric::fuzz::run({words, words + count}); }
