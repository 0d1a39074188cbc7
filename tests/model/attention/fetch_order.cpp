// Records what kernels of attention fetch ahead of their use: `__builtin_prefetch` is a function of this file. Prints
// one line per mistake, and nothing where every line of keys and values is fetched once, in time, and in the order of
// reading.
#define KTC_UNIT fetch_order

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

std::vector<const char*> fetched;
void record(const void* line, int, int) {
  fetched.push_back(static_cast<const char*>(line));
}

}  // namespace

#define __builtin_prefetch(line, write, locality) record(line, write, locality)
#include "ktc/cache_view.hpp"
#include "ktc/listed_rows.hpp"
#undef __builtin_prefetch

namespace {

using ktc::CacheView;
using ktc::HeadViews;
using Element = std::uint16_t;
constexpr std::int64_t kBlock = ktc::kPagePositions;
using Order = ktc::CacheOrder<Element, kBlock>;
using Ahead = ktc::CacheAhead<Element, kBlock>;

struct Case {
  std::string name;
  std::int64_t width, more_width;
  std::int64_t gap;  // numbers between a row and the next
  bool joint, paged;
  std::vector<std::int64_t> lengths;  // of the heads that are read one after the other
};

int mistakes = 0;
void expect(bool holds, const Case& of, const char* what) {
  if (holds) return;
  std::printf("%s: %s\n", of.name.c_str(), what);
  ++mistakes;
}

// The memory of a case: heads are apart, and pages in reverse order.
class Cache {
 public:
  explicit Cache(const Case& of) : case_(of), pages_(64) {
    std::iota(pages_.rbegin(), pages_.rend(), 0);
    keys_ = views(of.width);
    more_keys_ = views(of.more_width);
    values_ = of.joint ? keys_ : views(of.width);
  }

  HeadViews head(std::int64_t number) {
    return {at(keys_, number), at(more_keys_, number), at(values_, number), case_.paged ? pages_.data() : nullptr};
  }

  // The lines of a block, part by part in the order of reading.
  std::vector<std::set<const char*>> lines(const HeadViews& head, std::int64_t block, std::int64_t end) {
    const HeadViews own = head.of_block<Element>(block);
    std::vector<std::set<const char*>> parts;
    for (const CacheView* view : {&own.keys, &own.more_keys, &own.values}) {
      if (view->width == 0 || (view == &own.values && case_.joint)) continue;
      parts.emplace_back();
      for (std::int64_t row = 0; row < std::min(kBlock, end - block); ++row) {
        const char* from = static_cast<const char*>(view->data) + row * view->position * 2;
        for (std::int64_t byte = 0; byte < view->width * 2; byte += 2) parts.back().insert(line_of(from + byte));
      }
    }
    return parts;
  }

  static const char* line_of(const char* byte) {
    return byte - reinterpret_cast<std::uintptr_t>(byte) % ktc::kCacheLine;
  }

 private:
  static constexpr std::int64_t kHeads = 3, kMost = 8 * kBlock;

  struct Memory {
    const Element* data = nullptr;
    CacheView view;
  };

  Memory views(std::int64_t width) {
    if (width == 0) return {};
    const std::int64_t stride = width + case_.gap, of_page = kBlock * stride;
    const std::int64_t pages = case_.paged ? static_cast<std::int64_t>(pages_.size()) : 0;
    buffers_.emplace_back(kHeads * (kMost + pages * kBlock) * stride + 32);
    const auto* data =
        reinterpret_cast<const Element*>(Cache::line_of(reinterpret_cast<const char*>(buffers_.back().data() + 31)));
    const std::int64_t head = case_.paged ? of_page : kMost * stride, batch = case_.paged ? kHeads * of_page : 0;
    return {data, {.data = data, .batch = batch, .head = head, .position = stride, .width = width}};
  }

  static CacheView at(const Memory& memory, std::int64_t number) {
    CacheView view = memory.view;
    if (view.width > 0) view.data = memory.data + number * view.head;
    return view;
  }

  Case case_;
  std::vector<std::int32_t> pages_;
  std::vector<std::vector<Element>> buffers_;
  Memory keys_, more_keys_, values_;
};

// Reads a cache as kernels do, in `steps` per block, and compares what was fetched.
void check(const Case& of, std::int64_t steps) {
  Cache cache(of);
  fetched.clear();
  const auto heads = static_cast<std::int64_t>(of.lengths.size());
  Order order(cache.head(0));
  Ahead ahead(order);
  std::vector<std::set<const char*>> wanted;  // of all parts, in the order of reading
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t block = 0; block < of.lengths[head]; block += kBlock) {
      for (auto& part : cache.lines(cache.head(head), block, of.lengths[head])) wanted.push_back(std::move(part));
    }
  }
  std::size_t begun = 0;  // parts whose block is computed or was
  ahead.follow(cache.head(0), 0, of.lengths[0]);
  for (std::int64_t head = 0; head < heads; ++head) {
    if (head + 1 < heads) ahead.follow(cache.head(head + 1), 0, of.lengths[head + 1]);
    for (std::int64_t block = 0; block < of.lengths[head]; block += kBlock) {
      const std::int64_t positions = std::min(kBlock, of.lengths[head] - block);
      ahead.start_block(positions, steps);
      const bool whole = of.joint || of.more_width > 0;  // all of a block are ahead
      const std::size_t parts = cache.lines(cache.head(head), block, of.lengths[head]).size();
      const auto have = [&](std::size_t part) {
        const std::set<const char*> found(fetched.begin(), fetched.end());
        return std::includes(found.begin(), found.end(), wanted[part].begin(), wanted[part].end());
      };
      if (whole) {
        for (std::size_t part = 0; part < parts; ++part) expect(have(begun + part), of, "late for its block");
      } else {
        const std::set<const char*> found(fetched.begin(), fetched.end());
        std::size_t rows = 0;
        for (const char* line : wanted[begun]) rows += found.count(line);
        expect(4 * rows >= 3 * wanted[begun].size(), of, "fewer than three eighths are fetched");
      }
      for (std::int64_t step = 0; step < steps; ++step) ahead.step(1);
      for (std::size_t part = 0; part < parts; ++part) expect(have(begun + part), of, "not fetched by its block's end");
      begun += parts;
    }
  }
  std::set<const char*> all;
  std::size_t part = 0;
  for (const auto& each : wanted) all.insert(each.begin(), each.end());
  for (const char* line : fetched) {
    const char* const begin = Cache::line_of(line);
    if (all.count(begin) == 0) {  // a piece has four lines: behind the last row there may be three
      bool near = false;
      for (int back = 1; back < 4; ++back) near |= all.count(begin - back * ktc::kCacheLine) != 0;
      expect(near, of, "a line of nobody is fetched");
      continue;
    }
    while (part < wanted.size() && wanted[part].count(begin) == 0) ++part;
  }
  expect(part < wanted.size(), of, "not in the order of reading");
  std::map<const char*, int> times;
  for (const char* line : fetched) ++times[line];
  for (const auto& [line, count] : times) expect(count == 1, of, "a line is fetched again");
}

// The rows of a list, and those after its end.
void check_lists() {
  const Case of{"list", 128, 0, 0, false, false, {}};
  std::vector<Element> data(1000 * 160);
  const std::vector<std::int32_t> positions{5, 7, 8, 30, 31, 90, 400, 401, 999, 3};
  const ktc::ListedRows<Element> rows{data.data(), 160, positions.data(), 10};
  ktc::ListedAhead<Element> ahead(1280);  // eight rows are ahead
  fetched.clear();
  ahead.fetch<2>(rows, 0, 64, 128);
  const auto lines = [&](std::int64_t position, std::int64_t begin, std::int64_t end) {
    const auto* row = reinterpret_cast<const char*>(data.data() + position * 160);
    std::vector<const char*> found;
    for (const char* byte = row + 2 * begin; byte < row + 2 * end; byte += 2) {
      if (found.empty() || found.back() != Cache::line_of(byte)) found.push_back(Cache::line_of(byte));
    }
    return found;
  };
  std::vector<const char*> wanted = lines(999, 64, 128);
  for (const char* line : lines(3, 64, 128)) wanted.push_back(line);
  expect(fetched == wanted, of, "not the rows eight places ahead");
  fetched.clear();
  ahead.fetch<1>(rows.from(5), 4, 0, 32);
  expect(fetched == lines(3, 0, 32), of, "beyond the list's end");
  fetched.clear();
  ahead.from_memory(false);
  ahead.fetch<4>(rows, 0, 0, 128);
  expect(fetched.empty(), of, "fetched what is not from memory");
}

}  // namespace

int main() {
  const std::vector<Case> cases{
      {"rows that adjoin", 128, 0, 0, false, false, {512, 300}},
      {"heads that are interleaved", 128, 0, 128, false, false, {400, 128, 130}},
      {"keys in two parts", 64, 32, 0, false, false, {260, 5}},
      {"latents", 512, 64, 0, true, false, {300, 300}},
      {"pages", 128, 0, 0, false, true, {700, 1}},
      {"latents in pages", 512, 64, 0, true, true, {513, 129, 1}},
  };
  for (const Case& each : cases) {
    for (const std::int64_t steps : {100, 1000, 100000}) check(each, steps);
  }
  check_lists();
  return mistakes == 0 ? 0 : 1;
}
