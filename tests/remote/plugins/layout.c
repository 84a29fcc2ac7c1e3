/* The header is C, and the structures have the layout that compiled plug-ins rely on. */
#include <dynamicemb/tde_io.h>
#include <stddef.h>

#define AT(type, field, offset) \
  _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)

AT(IOPullParameter, table_name_, 0);
AT(IOPullParameter, num_cols_, 8);
AT(IOPullParameter, num_global_ids_, 12);
AT(IOPullParameter, col_ids_, 16);
AT(IOPullParameter, global_ids_, 24);
AT(IOPullParameter, num_optimizer_stats_, 32);
AT(IOPullParameter, on_complete_context_, 40);
AT(IOPullParameter, on_global_id_fetched_, 48);
AT(IOPullParameter, on_all_fetched_, 56);
_Static_assert(sizeof(IOFetchParameter) == 64, "IOPullParameter");
AT(IOPushParameter, table_name_, 0);
AT(IOPushParameter, num_cols_, 8);
AT(IOPushParameter, num_global_ids_, 12);
AT(IOPushParameter, col_ids_, 16);
AT(IOPushParameter, global_ids_, 24);
AT(IOPushParameter, num_optimizer_stats_, 32);
AT(IOPushParameter, optimizer_stats_ids_, 40);
AT(IOPushParameter, num_offsets_, 48);
AT(IOPushParameter, offsets_, 56);
AT(IOPushParameter, data_, 64);
AT(IOPushParameter, on_complete_context_, 72);
AT(IOPushParameter, on_push_complete, 80);
_Static_assert(sizeof(IOPushParameter) == 88, "IOPushParameter");

const char* IO_type = "only C";
