// Text that came from a peer.
#pragma once

#include <string>
#include <string_view>

namespace tensorwire {

// Valid UTF-8 without control characters: what may be shown to people and given to Python.
bool presentable(std::string_view text);
// The text if it is that, else "(unprintable)".
std::string presented(std::string_view text);

}  // namespace tensorwire
