// PTX text to instructions. Only the forms that the kernels of this project contain are taken;
// anything else is an error that quotes the line, never a guess.

#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr uint32_t kSharedBase = 1024;  // where dynamic shared memory starts

struct Operand {
  enum Kind : uint8_t { kNone, kRegister, kPredicate, kImmediate, kSpecial } kind = kNone;
  uint8_t bits = 32;     // of a register
  uint32_t index = 0;    // of a register, a predicate or a special register
  uint64_t value = 0;    // of an immediate
};

struct Address {
  Operand base;  // a register, an immediate (shared), or none: parameters
  int64_t offset = 0;
};

struct Instruction {
  std::string name;                       // up to the first dot
  std::vector<std::string> modifiers;     // what follows, by dots
  int guard = -1;                         // predicate
  bool guard_negated = false;
  std::vector<std::vector<Operand>> args; // a scalar is a list of one
  std::vector<Address> addresses;
  std::vector<Operand> coordinates;       // of a tensor copy
  std::string label;
  int32_t target = -1;
  int line = 0;
  std::string text;
  // what the machine resolved, see machine.h
  int handler = -1;
  int type_bits = 32;
  char type_kind = 'b';
  int flag = 0;

  bool has(const char* modifier) const {
    for (const auto& m : modifiers)
      if (m == modifier) return true;
    return false;
  }
};

struct Parameter {
  std::string name;
  uint32_t offset, size;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  std::vector<Instruction> code;
  uint32_t registers32 = 0, registers64 = 0, predicates = 0;
};

const char* const kSpecials[] = {"%tid.x",    "%tid.y",    "%tid.z",    "%ntid.x",   "%ctaid.x",
                                 "%ctaid.y",  "%ctaid.z",  "%nctaid.x", "%nctaid.y", "%nctaid.z",
                                 "%laneid",   "%warpid",   "%clusterid.x"};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  std::map<std::string, Kernel> parse() {
    std::map<std::string, Kernel> kernels;
    size_t at = 0;
    int line = 0;
    std::string current;
    while (next_line(at, line, current)) {
      size_t entry = current.find(".entry ");
      if (entry == std::string::npos || current.rfind("//", 0) == 0) continue;
      Kernel kernel;
      kernel.name = word(current.substr(entry + 7));
      while (next_line(at, line, current) && current != ")") parameter(kernel, current);
      while (next_line(at, line, current) && current != "{") {
      }
      body(kernel, at, line);
      kernels[kernel.name] = std::move(kernel);
    }
    return kernels;
  }

 private:
  struct Scope {
    std::map<std::string, uint32_t> predicates;
    std::map<std::string, std::string> labels;  // own name to unique name
  };

  const std::string& text_;
  std::vector<Scope> scopes_;
  std::map<std::string, int32_t> labels_;
  Kernel* kernel_ = nullptr;
  std::map<std::string, uint32_t> registers_;
  int scope_count_ = 0;

  bool next_line(size_t& at, int& line, std::string& out) {
    if (at >= text_.size()) return false;
    size_t end = text_.find('\n', at);
    if (end == std::string::npos) end = text_.size();
    out = trim(text_.substr(at, end - at));
    at = end + 1;
    ++line;
    return true;
  }

  static std::string trim(const std::string& s) {
    size_t first = s.find_first_not_of(" \t\r"), last = s.find_last_not_of(" \t\r");
    return first == std::string::npos ? "" : s.substr(first, last - first + 1);
  }

  static std::string word(const std::string& s) {
    return s.substr(0, s.find_first_of(" \t(,;[]"));
  }

  static void parameter(Kernel& kernel, const std::string& line) {
    if (line.rfind(".param", 0) != 0) return;
    uint32_t align = 0, size = 0;
    std::string name;
    size_t at = 0;
    std::string previous;
    while (at < line.size()) {
      size_t end = line.find_first_of(" \t,", at);
      if (end == std::string::npos) end = line.size();
      std::string token = line.substr(at, end - at);
      at = end + 1;
      if (token.empty()) continue;
      if (previous == ".align" && align == 0) align = std::stoul(token);
      if (token.size() > 2 && token[0] == '.' && strchr("busf", token[1]) && isdigit(token[2]))
        size = std::stoul(token.substr(2)) / 8;
      if (token[0] != '.' && !isdigit(token[0])) name = token;
      previous = token;
    }
    size_t bracket = name.find('[');
    if (bracket != std::string::npos) {
      size = std::stoul(name.substr(bracket + 1));
      name = name.substr(0, bracket);
    } else {
      align = size;  // .ptr's alignment is the pointee's
    }
    kernel.parameter_bytes = (kernel.parameter_bytes + align - 1) / align * align;
    kernel.parameters.push_back({name, kernel.parameter_bytes, size});
    kernel.parameter_bytes += size;
  }

  void body(Kernel& kernel, size_t& at, int& line) {
    kernel_ = &kernel;
    labels_.clear();
    registers_.clear();
    scopes_.assign(1, Scope());
    std::string current;
    while (next_line(at, line, current)) {
      size_t comment = current.find("//");
      if (comment != std::string::npos) current = trim(current.substr(0, comment));
      while (!current.empty()) {
        if (current[0] == '{') {
          scopes_.push_back(Scope());
          ++scope_count_;
          find_local_labels(at);
          current = trim(current.substr(1));
        } else if (current[0] == '}') {
          scopes_.pop_back();
          if (scopes_.empty()) return resolve();
          current = trim(current.substr(1));
        } else {
          size_t colon = current.find(':');
          size_t space = current.find_first_of(" \t{;[");
          if (colon != std::string::npos && (space == std::string::npos || colon < space) &&
              current[colon + 1] != ':') {
            labels_[unique_label(current.substr(0, colon))] = kernel.code.size();
            current = trim(current.substr(colon + 1));
            continue;
          }
          size_t end = current.find(';');
          if (end == std::string::npos) throw Fault("line " + std::to_string(line) + ": " + current);
          statement(trim(current.substr(0, end)), line);
          current = trim(current.substr(end + 1));
        }
      }
    }
    throw Fault(kernel.name + ": no end of its body");
  }

  // labels of a scope may be used before they stand
  void find_local_labels(size_t at) {
    size_t end = text_.find('}', at);
    std::string block = text_.substr(at, end - at);
    size_t start = 0;
    while (start < block.size()) {
      size_t stop = block.find('\n', start);
      if (stop == std::string::npos) stop = block.size();
      std::string current = trim(block.substr(start, stop - start));
      size_t colon = current.find(':');
      if (colon != std::string::npos && colon > 0 &&
          current.find_first_of(" \t.[") > colon) {
        std::string name = current.substr(0, colon);
        scopes_.back().labels[name] = name + "@" + std::to_string(scope_count_);
      }
      start = stop + 1;
    }
  }

  std::string unique_label(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      auto found = scope->labels.find(name);
      if (found != scope->labels.end()) return found->second;
    }
    return name;
  }

  void statement(const std::string& s, int line) {
    if (s.rfind(".reg", 0) == 0) return declare(s);
    if (s[0] == '.') return;  // .pragma, .loc
    Instruction inst;
    inst.line = line;
    inst.text = s;
    std::string rest = s;
    try {
      if (rest[0] == '@') {
        size_t space = rest.find_first_of(" \t");
        std::string guard = rest.substr(1, space - 1);
        inst.guard_negated = guard[0] == '!';
        inst.guard = operand(guard.substr(inst.guard_negated)).index;
        rest = trim(rest.substr(space));
      }
      size_t space = rest.find_first_of(" \t");
      opcode(inst, rest.substr(0, space));
      if (space != std::string::npos) operands(inst, rest.substr(space));
    } catch (const std::exception& error) {
      throw Fault("line " + std::to_string(line) + ": " + s + ": " + error.what());
    }
    kernel_->code.push_back(std::move(inst));
  }

  void declare(const std::string& s) {
    // .reg .pred p;   names with <N> need no declaration
    size_t kind = s.find(".pred");
    if (s.find('<') != std::string::npos || kind == std::string::npos) return;
    scopes_.back().predicates[trim(s.substr(kind + 5))] = kernel_->predicates++;
  }

  static void opcode(Instruction& inst, const std::string& s) {
    size_t at = 0;
    while (at <= s.size()) {
      size_t dot = s.find('.', at);
      if (dot == std::string::npos) dot = s.size();
      std::string part = s.substr(at, dot - at);
      if (at == 0)
        inst.name = part;
      else if (!part.empty())
        inst.modifiers.push_back(part);
      at = dot + 1;
    }
  }

  void operands(Instruction& inst, const std::string& s) {
    size_t at = 0;
    while (at < s.size()) {
      char c = s[at];
      if (c == ' ' || c == '\t' || c == ',' || c == '|') {
        ++at;
      } else if (c == '{') {
        size_t end = s.find('}', at);
        inst.args.push_back(list(s.substr(at + 1, end - at - 1)));
        at = end + 1;
      } else if (c == '[') {
        size_t end = s.find(']', at);
        address(inst, s.substr(at + 1, end - at - 1));
        at = end + 1;
      } else {
        size_t end = s.find_first_of(",| \t", at);
        if (end == std::string::npos) end = s.size();
        std::string token = s.substr(at, end - at);
        if (inst.name == "bra") {
          inst.label = unique_label(token);
        } else {
          inst.args.push_back({operand(token)});
        }
        at = end;
      }
    }
  }

  std::vector<Operand> list(const std::string& s) {
    std::vector<Operand> found;
    size_t at = 0;
    while (at < s.size()) {
      size_t end = s.find(',', at);
      if (end == std::string::npos) end = s.size();
      found.push_back(operand(trim(s.substr(at, end - at))));
      at = end + 1;
    }
    return found;
  }

  void address(Instruction& inst, const std::string& s) {
    Address found;
    size_t brace = s.find('{');
    std::string base = trim(s.substr(0, brace == std::string::npos ? s.size() : s.find(',')));
    if (brace != std::string::npos)
      inst.coordinates = list(s.substr(brace + 1, s.find('}') - brace - 1));
    size_t plus = base.find('+');
    if (plus != std::string::npos) {
      found.offset = std::stoll(base.substr(plus + 1));
      base = base.substr(0, plus);
    }
    found.base = operand(base);
    inst.addresses.push_back(found);
  }

  Operand operand(const std::string& s) {
    Operand o;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      auto found = scope->predicates.find(s);
      if (found != scope->predicates.end()) {
        o.kind = Operand::kPredicate;
        o.index = found->second;
        return o;
      }
    }
    if (s[0] == '%') {
      for (uint32_t i = 0; i < sizeof(kSpecials) / sizeof(*kSpecials); ++i)
        if (s == kSpecials[i]) {
          o.kind = Operand::kSpecial;
          o.index = i;
          return o;
        }
      o.kind = s.rfind("%p", 0) == 0 ? Operand::kPredicate : Operand::kRegister;
      o.bits = s.rfind("%rd", 0) == 0 ? 64 : s.rfind("%rs", 0) == 0 ? 16 : 32;
      uint32_t& count = o.kind == Operand::kPredicate ? kernel_->predicates
                        : o.bits == 64                ? kernel_->registers64
                                                      : kernel_->registers32;
      auto found = registers_.find(s);
      if (found == registers_.end()) found = registers_.emplace(s, count++).first;
      o.index = found->second;
      return o;
    }
    o.kind = Operand::kImmediate;
    if (s == "_") {
      o.kind = Operand::kNone;
    } else if (s.rfind("0f", 0) == 0) {
      o.value = std::stoul(s.substr(2), nullptr, 16);
    } else if (isdigit(s[0]) || s[0] == '-') {
      o.value = s[0] == '-' ? (uint64_t)std::stoll(s, nullptr, 0) : std::stoull(s, nullptr, 0);
    } else if (s.rfind("__dynamic_shmem", 0) == 0) {
      o.value = kSharedBase;
    } else {
      o.kind = Operand::kNone;
      for (const auto& p : kernel_->parameters)
        if (p.name == s) {
          o.kind = Operand::kSpecial;
          o.index = 1000;  // an address among the parameters
          o.value = p.offset;
        }
      if (o.kind == Operand::kNone) throw Fault("unknown operand " + s);
    }
    return o;
  }

  void resolve() {
    for (auto& inst : kernel_->code)
      if (!inst.label.empty()) {
        auto found = labels_.find(inst.label);
        if (found == labels_.end()) throw Fault("no label " + inst.label);
        inst.target = found->second;
      }
  }
};

}  // namespace emulator
