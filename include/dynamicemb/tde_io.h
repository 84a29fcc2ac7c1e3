/* The interface between torchrec_dynamic_embedding and a native plug-in: a shared library that
 * stores rows somewhere of its own. Plain C; nothing of C++ crosses it.
 *
 * A plug-in exports one variable and four functions:
 *
 *     const char* IO_type = "mine";            the scheme of its URLs: mine://text
 *     void* IO_Initialize(const char* text);   what stands after "://"; valid during the call. A
 *                                              store of rows, or NULL if there can be none
 *     void IO_Finalize(void* store);           after the last call with that store
 *     void IO_Pull(void* store, struct IOPullParameter);     read rows (or by the name IO_Fetch)
 *     void IO_Push(void* store, struct IOPushParameter);     write rows
 *
 * and is made known by torch.ops.tde.register_io("/path/to/plugin.so"). Each table has a store of
 * its own. A row is `num_optimizer_stats_` parts of bytes: the weight (part 0) and the states of
 * the optimizer. IO_Pull and IO_Push may return before the work is done, and be called again
 * meanwhile. The callbacks may be called from any thread, also before IO_Pull or IO_Push return.
 * There is no error code. A plug-in in C++ may throw from IO_Initialize, IO_Pull and IO_Push; a
 * call that is never called back is given up after a time, and its memory kept.
 */
#ifndef DYNAMICEMB_TDE_IO_H_
#define DYNAMICEMB_TDE_IO_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `num_global_ids_` and `num_cols_` are at least 1 (`col_ids_` is {0}). The names and arrays are
 * valid until IO_Pull returns. */
struct IOPullParameter {
  const char* table_name_;
  uint32_t num_cols_;
  uint32_t num_global_ids_;
  const int64_t* col_ids_;
  const int64_t* global_ids_;
  uint32_t num_optimizer_stats_;
  void* on_complete_context_;
  /* Once for every id, column and part, in any order: offset = id * num_cols_ + column, both
   * counted from 0. data is read during the call; NULL and a length of 0: there is none. */
  void (*on_global_id_fetched_)(void* context, uint32_t offset, uint32_t optimizer_state,
                                void* data, uint32_t data_len);
  /* Once, after all of them. */
  void (*on_all_fetched_)(void* context);
};

/* `table_name_` is valid until IO_Push returns, everything else until on_push_complete is called,
 * which must happen once, when the rows are written. The bytes of part s of column c of id i are
 * data_[offsets_[x]] to data_[offsets_[x + 1]], x = (i * num_cols_ + c) * num_optimizer_stats_ + s;
 * s counts the entries of `optimizer_stats_ids_`. */
struct IOPushParameter {
  const char* table_name_;
  uint32_t num_cols_;
  uint32_t num_global_ids_;
  const int64_t* col_ids_;
  const int64_t* global_ids_;
  uint32_t num_optimizer_stats_;
  const uint32_t* optimizer_stats_ids_;
  uint32_t num_offsets_;
  const uint64_t* offsets_;
  const void* data_;
  void* on_complete_context_;
  void (*on_push_complete)(void* context);
};

#ifndef __cplusplus
typedef struct IOPullParameter IOPullParameter;
typedef struct IOPushParameter IOPushParameter;
#endif
typedef struct IOPullParameter IOFetchParameter; /* the same under its other name */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DYNAMICEMB_TDE_IO_H_ */
