// Frames of prepared launches, for callers in C++. Written from the tables
// of cudnn_frost.runtime.prepared, which says what a frame is.
#pragma once

#include <cstdint>

namespace cudnn_frost {

constexpr int64_t kSchemaVersion = 1;

enum Feature : int64_t {
  kLengths = 1,
  kRagged = 2,
  kPagedKv = 4,
  kFp8Scales = 8,
  kAmax = 16,
  kSoftmaxSums = 32,
  kDeviceScale = 64,
  kSink = 128,
  kBias = 256,
};

// Places in a frame. Slots a plan does not use are null.
enum Argument : int {
  kVersion,
  kKnownFeatures,
  kQSlot,
  kKSlot,
  kVSlot,
  kOSlot,
  kStatsSlot,
  kScoreMaxSlot,
  kScoreSumExpSlot,
  kAmaxSSlot,
  kAmaxOSlot,
  kSeqLenQSlot,
  kSeqLenKvSlot,
  kQRaggedOffsetSlot,
  kKRaggedOffsetSlot,
  kVRaggedOffsetSlot,
  kORaggedOffsetSlot,
  kStatsRaggedOffsetSlot,
  kScoreMaxRaggedOffsetSlot,
  kScoreSumExpRaggedOffsetSlot,
  kKTableSlot,
  kVTableSlot,
  kDescaleQSlot,
  kDescaleKSlot,
  kDescaleVSlot,
  kDescaleSSlot,
  kScaleSSlot,
  kScaleOSlot,
  kAttnScaleSlot,
  kSinkSlot,
  kBiasSlot,
  kWorkspace,
  kWorkspaceBytes,
  kStream,
  kNumArguments,
};

}  // namespace cudnn_frost
