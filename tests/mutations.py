"""Planted faults: does a test notice each of them?

    python -m tests.mutations                    # all of them, each with the tests that are expected to notice it
    python -m tests.mutations 'a name' ...       # only those
    python -m tests.mutations --all-tests        # each with all default tests: hours
    python -m tests.mutations --list             # names, and whether the text of each is found

The checkout is copied to a scratch folder. One fault at a time is put into the copy, and the tests run there. A fault
is a text of the source code and its replacement. The text is looked for in all files of `extract/` and `pipelines/`,
and tests are named by their functions, so that both may move to other files. A text that is not found exactly once is
an error. The exit code is 1 if a fault was not noticed, and 2 if a fault or a test cannot be found.

Three faults are not noticed by the tests that they name:

* The status of a row is written before its features. Hashes find such a row when the run is resumed, so the order in
  which columns are written is a second line of defence.
* A small file is renamed before its content is on the disk. No test looks at the `fsync` of small files.
* A search leaves out rows that float32 puts behind the last one found. No test of `search` needs the margin.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("extract", "pipelines")
TEST_S = 600  # after which a fault that makes tests hang counts as noticed


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong, as a sentence.
        old: text that occurs once in the source code.
        new: what takes its place.
        tests: functions that are expected to notice it.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # Taps: hooks, records, edits, gradients
    Mutation(
        "A kept output is the layer's own memory, not a copy.",
        "        value.clone()\n",
        "        value\n",
        ("test_inplace_layers_do_not_change_kept_outputs",),
    ),
    Mutation(
        "All calls of a layer have the number of the first one.",
        "            return Call(number, forward)",
        "            return Call(0, forward)",
        ("test_every_call_of_a_shared_layer_is_kept", "test_one_call_can_be_asked_for"),
    ),
    Mutation(
        "The second forward keeps the record of the first.",
        "        self.forward = ModelCall(record,",
        "        self.forward = self.forward or ModelCall(record,",
        ("test_a_layer_that_did_not_run_raises_and_does_not_answer_with_old_values",),
    ),
    Mutation(
        "Stopping early ends the forward one call too soon.",
        "        if self._stoppable and self._to_keep and not forward.left:",
        "        if self._stoppable and self._to_keep and forward.left <= 1:",
        ("test_stop_ends_the_forward_after_the_last_call_asked_for",),
    ),
    Mutation(
        "Ablating some channels takes out all others instead.",
        "for a in range(h.ndim)]), instead, h)",
        "for a in range(h.ndim)]), h, instead)",
        ("test_a_verb_is_its_formula",),
    ),
    Mutation(
        "An edit of a gradient is recorded but does not flow on.",
        "        return gradient if edits else None",
        "        return None",
        ("test_clipping_at_one_layer_changes_what_flows_on",),
    ),
    # Which rows belong to which image
    Mutation(
        "A layer that mixes the images of a batch is taken for one row an image.",
        "if not same_gaps or not nearer or own > max(",
        "if not same_gaps and not nearer and own > max(",
        ("test_no_mixture_or_order_of_images_passes_for_rows", "test_layers_whose_rows_are_not_the_images_are_refused"),
    ),
    # Code of users
    Mutation(
        "A transform that rarely changes a picture is not found to be random.",
        'return "draws random numbers" if _random_states() != states else ""',
        'return ""',
        ("test_a_random_transform_is_refused",),
    ),
    Mutation(
        "A backbone that calls sys.exit ends the program.",
        "    except SystemExit as stop:",
        "    except ZeroDivisionError as stop:",
        ("test_hub_code_cannot_end_the_program",),
    ),
    # Pooling and choice of features
    Mutation(
        "The mean of tokens includes the class token.",
        'return x[:, layout.prefix_tokens :] if layout.kind == "tokens" else x',
        "return x",
        ("test_pooling_equals_numpy", "test_tokens_are_pooled_as_the_model_pools_them"),
    ),
    Mutation(
        "Means of 16-bit maps are taken in 16 bits.",
        "x.mean(axes, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)",
        "x.mean(axes)",
        ("test_half_precision_maps_are_averaged_in_float32",),
    ),
    Mutation(
        "The cells of a grid leave out a row where the side is not divisible.",
        "cells = [(cell * side // size, -(-(cell + 1) * side // size)) for cell in range(size)]",
        "cells = [(cell * side // size, (cell + 1) * side // size) for cell in range(size)]",
        ("test_a_grid_has_the_cells_of_adaptive_average_pooling",),
    ),
    Mutation(
        "An image with a value that is not finite is projected to finite values.",
        "return projected + zeros + projected.sum(1, keepdim=True) * 0",
        "return projected",
        ("test_an_image_with_a_value_that_is_not_finite_becomes_nan_and_no_other",),
    ),
    Mutation(
        "A projection does not depend on its seed.",
        "np.random.PCG64([seed, 0])",
        "np.random.PCG64([0, 0])",
        ("test_entries_are_those_of_the_definition", "test_seeds_give_other_matrices"),
    ),
    Mutation(
        "A projection without a number has the bound for the images at hand, not that of the data set.",
        "settings = replace(settings, layers=layers, batch_size",
        "settings = replace(settings, batch_size",
        ("test_without_a_number_the_bound_for_the_images_is_taken_and_recorded",),
    ),
    Mutation(
        "The embedding is what the classifier gives, not what it is given.",
        'return [_Request(backbone.classifier, "", pooling, what="input")]',
        'return [_Request(backbone.classifier, "", pooling, what="output")]',
        ("test_the_embedding_is_the_input_of_the_classifier",),
    ),
    # Images: preprocessing, decoding, listing, archives, loading
    Mutation(
        "Pixels are scaled by 256 instead of 255.",
        ".to(torch.float32).div_(255)",
        ".to(torch.float32).div_(256)",
        ("test_input_is_normalised_per_channel", "test_timm_numbers_equal_timms_own_transform"),
    ),
    Mutation(
        "The orientation that EXIF gives is not applied.",
        "    return ImageOps.exif_transpose(image) if turned else image",
        "    return image",
        ("test_each_orientation_is_applied_once",),
    ),
    Mutation(
        "A colour profile is applied only to pictures that have no alpha.",
        "    if alpha is not None:\n        converted.putalpha(alpha)",
        "    if alpha is not None:\n        return image",
        ("test_transparency_is_laid_over_white_after_the_conversion",),
    ),
    Mutation(
        "A TIFF picture is turned although its orientation is to be ignored.",
        'return picture if orientation == "exif" else _turned_back(picture, stored)',
        "return picture",
        ("test_a_tiff_is_turned_or_as_it_is_stored_though_pillow_turns_it_while_loading",),
    ),
    Mutation(
        "Search and verify decode with the defaults, not as recorded.",
        "            **how_decoded(dataset.depends_on),\n",
        "",
        ("test_commands_compute_again_as_it_is_recorded",),
    ),
    Mutation(
        "A transform of a library may make pictures of any size.",
        "            shorter = round(min(self.crop_px) * _LIBRARY_RESIZES)",
        "            return",
        ("test_no_transform_makes_a_huge_picture_of_a_thin_one",),
    ),
    Mutation(
        "A file of any size is read from a folder.",
        "            check_file_size(status.st_size)\n",
        "",
        ("test_a_file_of_too_many_bytes_is_not_read_from_a_folder_a_list_or_an_archive",),
    ),
    Mutation(
        "A truncated picture is filled up with grey.",
        "= max_pixels / 2, False",
        "= max_pixels / 2, True",
        ("test_a_file_cut_at_any_tenth_byte_is_refused_or_whole",),
    ),
    Mutation(
        "A JPEG without end marker passes, although its tail is zeros.",
        "        if not data.endswith(_END_OF_JPEG) and not _has_end_of_jpeg(data):",
        "        if False:",
        ("test_a_jpeg_whose_tail_is_zeros_is_refused_at_any_cut",),
    ),
    Mutation(
        "The end marker of a thumbnail counts as that of the picture.",
        "        position += int.from_bytes(data[position : position + 2], \"big\")",
        "        position += 2",
        ("test_a_first_picture_that_is_zeros_is_refused_though_its_thumbnail_and_the_garbage_have_end_markers",),
    ),
    Mutation(
        "Images are sorted by characters, not by bytes.",
        "    return sorted(range(len(encoded)), key=encoded.__getitem__)",
        "    return sorted(range(len(encoded)), key=paths.__getitem__)",
        ("test_names_of_any_bytes_come_through_lists_and_archives_in_the_order_of_their_bytes",),
    ),
    Mutation(
        "A damaged member of a zip is read without a look at its checksum.",
        '        if len(data) != size or zlib.crc32(data) != member["crc"]:',
        "        if len(data) != size:",
        ("test_damage_in_a_zip_is_a_row_with_a_reason",),
    ),
    Mutation(
        "Of a member that is in an archive twice, the first counts.",
        "            latest[member.name] = member",
        "            latest.setdefault(member.name, member)",
        ("test_of_a_member_that_is_there_twice_the_last_counts",),
    ),
    Mutation(
        "A part of a batch has images of other rows, where a row before them failed.",
        "        chosen = [int(good[i]) for i in positions if self.status[i] == Status.OK]",
        "        chosen = [i for i in positions if self.status[i] == Status.OK]",
        ("test_part_of_a_batch_keeps_images_and_reasons_together",),
    ),
    Mutation(
        "A second copy of an image in a batch gets no features.",
        "        features = {name: self._shard.take(name, origins) for name in self._kept}\n",
        "        features = {name: 0 * self._shard.take(name, origins) for name in self._kept}\n",
        ("test_the_same_bytes_are_computed_once_and_stored_twice",),
    ),
    Mutation(
        "A relative name in a list is sent to a web server as it is.",
        "    return quote(os.fsencode(name)) if is_http(folder) else name",
        "    return name",
        ("test_relative_names_of_a_list_behind_a_web_server_are_file_names",),
    ),
    Mutation(
        "A file that a web server refuses counts as missing.",
        "    if is_http(url) and error.__cause__ is not None:",
        "    if False:",
        ("test_the_status_of_a_refused_file_is_reported",),
    ),
    Mutation(
        "Two spellings of a path in a list are two images.",
        "    return Row(os.fsencode(plain_path(path, where)), place",
        "    return Row(os.fsencode(path), place",
        ("test_two_spellings_of_a_path_are_the_same_image", "test_a_list_of_find_gives_the_rows_of_the_folder"),
    ),
    Mutation(
        "A mean of pixels from 0 to 255 is accepted.",
        "    check_normalisation(overrides)\n    source, request",
        "    source, request",
        ("test_means_of_pixels_from_0_to_255_are_refused_before_anything_is_loaded",),
    ),
    # Weights
    Mutation(
        "Of several networks in a checkpoint, the last is taken.",
        "    key, *unused_keys = states\n",
        "    *unused_keys, key = states\n",
        ("test_a_wrapped_checkpoint_is_taken_apart",),
    ),
    # Forward, transfers, validation of the first batch
    Mutation(
        "Rows without a picture hold zeros, not NaN.",
        "np.iinfo(dtype).min if dtype.kind == \"i\" else np.nan, dtype)",
        "0, dtype)",
        ("test_broken_files_are_rows_with_a_status_and_nan",),
    ),
    Mutation(
        "The wait for features counts for no stage.",
        '    stages["forward"] += time.perf_counter() - asked\n    return batch, values',
        "    return batch, values",
        ("test_each_second_of_a_shard_counts_for_the_stage_that_takes_it",),
    ),
    Mutation(
        "A copy from the device is read before it has arrived.",
        "        arrived.synchronize()\n",
        "",
        ("test_every_copy_arrives_whole_whatever_the_order_in_which_they_are_made",),
    ),
    Mutation(
        "Compiled features that are NaN agree with everything.",
        "        if min_cosine is None and not values.max_deviation <= FULL_PRECISION:",
        "        if min_cosine is None and values.max_deviation > FULL_PRECISION:",
        ("test_values_that_are_not_finite_do_not_agree",),
    ),
    Mutation(
        "Only the first picture of the first batch is compared.",
        "        for expected, other in zip(values, computed[name], strict=True):  # row by row, since maps are large",
        "        for expected, other in zip(values[:1], computed[name][:1], strict=True):",
        ("test_what_is_off_later_in_the_batch_is_found",),
    ),
    # Store: writer, reader, hashes, verify, merge, export
    Mutation(
        "Rows are never forced to the disk while a shard is written.",
        "            if time.monotonic() - self._synced >= self._sync_s:",
        "            if time.monotonic() - self._synced < 0:",
        ("test_batches_are_forced_to_the_disk_as_often_as_asked",),
    ),
    Mutation(
        "A closed reader unmaps rows that are in use.",
        "        return np.frombuffer(self._mapping, dtype, math.prod(shape), start).reshape(shape)",
        "        return np.ndarray(shape, dtype, self._mapping, start)",
        ("test_after_a_reader_is_closed_batches_are_right_or_an_error",),
    ),
    Mutation(
        "Rows in the file cache are not verified.",
        "        if view is not None and self._verify is not None:\n            self._verify(rows)\n",
        "",
        ("test_a_changed_row_is_noticed_in_the_file_cache",),
    ),
    Mutation(
        "A row that is not yielded shifts the rows in the file cache that follow it.",
        "source, positions = mapped, window[order] - window.min()",
        "source, positions = mapped, order",
        ("test_rows_in_the_file_cache_are_not_buffered_and_come_in_the_same_order",),
    ),
    Mutation(
        "Rows that are not in the file cache are read in random order.",
        "not in the cache; EOPNOTSUPP: the file system does not say\n                return None",
        "not in the cache; EOPNOTSUPP: the file system does not say\n                pass",
        ("test_rows_that_are_not_in_the_file_cache_are_buffered",),
    ),
    Mutation(
        "The status of a row is written before its features.",
        'places = {f"/features/{name}": values for name, values in features.items()}',
        'places = {"/status": columns["status"]} | {f"/features/{name}": values for name, values in features.items()}',
        (
            "test_a_killed_write_leaves_its_rows_pending_and_the_others_stored",
            "test_no_row_that_says_it_is_done_is_wrong",
        ),
    ),
    Mutation(
        "A row behind the end of a shard is taken.",
        "local[-1] < len(self.status) and (np.diff(local) > 0).all()",
        "local[-1] <= len(self.status) and (np.diff(local) > 0).all()",
        ("test_rows_of_another_shard_or_in_disorder_are_refused",),
    ),
    Mutation(
        "The hash of a row depends on the order in which layers were asked for.",
        "    columns = [np.ascontiguousarray(features[name]) for name in sorted(features)]",
        "    columns = [np.ascontiguousarray(features[name]) for name in features]",
        ("test_plain_h5py_reads_a_shard", "test_features_are_stored_plain_and_taken_on_disk_at_creation"),
    ),
    Mutation(
        "Rows without a label are read with the last class.",
        "            numbers = np.array([*(number[name] for name in selection.classes), -1], np.int64)  # -1 stays -1",
        "            numbers = np.array([number[name] for name in selection.classes], np.int64)",
        ("test_unlabelled_test_images_leave_val_to_test_on",),
    ),
    Mutation(
        "verify does not compare features with their hash.",
        '        agree &= False if block is None else hash_rows(block) == here["row_hash"]',
        '        agree &= block is not None',
        ("test_a_changed_feature_is_named_and_filled_again",),
    ),
    Mutation(
        "verify does not compare files with the sha256 of their receipts.",
        'expected = {**vars(shard.identity), **size_and_hash(shard.path)}',
        'expected = {**vars(shard.identity)}',
        ("test_lost_and_changed_receipts_are_found",),
    ),
    Mutation(
        "A merged data set has paths in order, and features out of order.",
        "return root, [paths[row] for row in order], np.array(order, np.int64)",
        "return root, [paths[row] for row in order], np.arange(len(order))",
        ("test_two_data_sets_become_one_sorted_by_path",),
    ),
    Mutation(
        "Exported rows have the class before theirs.",
        '        classes = [*reader.classes, ""]  # label -1 indexes the last entry',
        '        classes = ["", *reader.classes]',
        ("test_numpy_files",),
    ),
    # Locks and atomic files
    Mutation(
        "Two processes may write to a data set at once.",
        "        _lock(file, fcntl.LOCK_EX, out)",
        "        _lock(file, fcntl.LOCK_SH, out)",
        ("test_one_process_at_a_time",),
    ),
    Mutation(
        "A small file is renamed before its content is on the disk.",
        "        flush_to_disk(file.fileno())\n        temporary.rename(path)",
        "        temporary.rename(path)",
        ("test_no_row_that_says_it_is_done_is_wrong", "test_a_published_shard_always_has_its_receipt"),
    ),
    Mutation(
        "A file is moved to a name that was taken in the meantime.",
        "    try:\n        os.link(path, name)\n    except FileExistsError:\n        raise\n",
        "    try:\n        name.unlink(missing_ok=True)\n        os.link(path, name)\n",
        ("test_names_of_files_that_are_too_long_or_taken_meanwhile",),
    ),
    # Sync and schedule
    Mutation(
        "A file that is still being written is read.",
        "    recent = range(scanned_ns - settle_ns + 1, scanned.ended_ns + settle_ns) if settle_ns else range(0)",
        "    recent = range(0)",
        ("test_a_file_waits_until_it_is_left_alone",),
    ),
    Mutation(
        "A second change within the steps of a clock is not looked for.",
        "    return file.ctime_ns <= scanned_ns and latest < scanned_ns - _STEP_NS",
        "    return file.ctime_ns <= scanned_ns and latest <= scanned_ns",
        ("test_a_change_within_the_steps_of_a_clock_is_found",),
    ),
    Mutation(
        "When most files are gone, their rows go with them.",
        "        if vanished > self.guards.max_vanish * n_files and not self.force:",
        "        if folder_changes.vanished > n_files and not self.force:",
        ("test_a_quarter_gone_is_too_much_unless_it_is_forced",),
    ),
    Mutation(
        "The rows of an interrupted pass are not known.",
        "    arrays.append(stored[is_new])",
        "    arrays.append(stored[:0])",
        ("test_the_rows_of_an_interrupted_first_pass_survive_an_error_of_the_settings",),
    ),
    Mutation(
        "A pass that was due while nothing ran waits for the next time.",
        "due = looked if schedule.catch_up else",
        "due =",
        ("test_a_pass_that_was_due_while_nothing_ran_begins_at_once",),
    ),
    Mutation(
        "An explosion is compared with all layers, those behind it included.",
        "    sizes_before = [tensors[0].input_rms] if tensors else []\n",
        "    sizes_before = [tensor.activations.rms for tensor in tensors]\n",
        ("test_an_explosion_names_its_gain_that_of_other_layers_and_all_layers_behind_once",),
    ),
    Mutation(
        "Equal inputs are not told from others.",
        "        return self.count > 1 and not self._differ\n",
        "        return False\n",
        ("test_two_inputs_of_one_picture_are_equal_and_channels_are_not_called_dead",),
    ),
    Mutation(
        "The penalty of logistic regression does not depend on the number of rows.",
        "        return 1 / (strengths * self.count)\n",
        "        return 1 / strengths\n",
        ("test_every_strength_reaches_the_objective_of_scikit_learn",),
    ),
    Mutation(
        "McNemar's test leaves out the observed number.",
        "             for i in range(min(first, second) + 1)]",
        "             for i in range(max(1, min(first, second)))]",
        ("test_mcnemar_is_the_binomial_test_of_scipy",),
    ),
    Mutation(
        "The calibration error is divided by the number of bins, not of images.",
        "    return float(np.abs(apart).sum() / len(confidence))",
        "    return float(np.abs(apart).sum() / _BINS)",
        ("test_the_calibration_error_is_the_mean_distance_of_confidence_and_accuracy",),
    ),
    Mutation(
        "The final probe is fitted without the validation rows.",
        "    return _Choice(compare, train + val, len(val), chosen_on)",
        "    return _Choice(compare, train, len(val), chosen_on)",
        ("test_simclr_takes_the_best_of_45_strengths_on_val_and_fits_again",),
    ),
    Mutation(
        "The best layer is chosen on the rows that judge it.",
        "            return dict(feature.result.curve)[shots] if shots else feature.result.validation",
        "            return dict(feature.result.curve)[shots] if shots else feature.result.value",
        ("test_the_best_layer_is_never_chosen_on_test_images",),
    ),
    Mutation(
        "The rows of a fold are among those that its probe is fitted on.",
        "[fold_of != number for number in range(n_folds)]",
        "[fold_of >= -1 for number in range(n_folds)]",
        ("test_scores_of_left_out_rows_are_those_of_fits_without_them",),
    ),
    Mutation(
        "A shard that is opened on first use is not compared with its data set.",
        "        opened = dataset.open_shard(shard, path)\n        _stored_rows(opened, partial=False)",
        "        opened = Shard(path)\n        _stored_rows(opened, partial=False)",
        ("test_a_shard_of_another_data_set_is_refused_when_it_is_read",),
    ),
    Mutation(
        "An error of a write to a new HDF5 file is forgotten.",
        "        raw.close()\n    if raw.error is not None:\n",
        "        raw.close()\n    if False:\n",
        ("test_each_failed_write_of_a_new_shard_is_an_error", "test_each_failed_write_of_an_export_is_an_error"),
    ),
    Mutation(
        "A table of changes, of an earlier version of layertap, is read as one of all rows.",
        "    if len(passes) != n_rows:\n",
        "    if False:\n",
        ("test_a_table_of_changes_of_an_earlier_version_is_refused_and_written_whole_by_the_next_pass",),
    ),
    Mutation(
        "An encoder computes a padded batch in another way while functions are watched.",
        "        if watched and self._capture.running() and _is_fused(encoder, arguments):",
        "        if False:",
        ("test_functions_and_edits_before_the_end_of_an_encoder_that_leaves_zeros_are_refused",),
    ),
    Mutation(
        "Labels and splits in a receipt are not compared by verify.",
        "        expected |= {entry: value",
        "        _ = {entry: value",
        ("test_verify_compares_the_counts",),
    ),
    Mutation(
        "Shards stay open above the limit of open files.",
        "            first.opened = None",
        "            pass",
        ("test_the_shard_that_was_opened_first_is_closed_at_the_limit",),
    ),
    Mutation(
        "A request to a bucket is given up after five attempts.",
        "            if attempt >= _ATTEMPTS and passed_s >= _GIVE_UP_S:",
        "            if attempt >= _ATTEMPTS:",
        ("test_a_request_is_retried_for_a_minute_with_growing_pauses",),
    ),
    Mutation(
        "A silent bucket is not reported.",
        "            if _is_timeout(error):\n                _report",
        "            if False:\n                _report",
        ("test_a_silent_server_is_reported_after_the_first_request_and_once_for_all",),
    ),
    Mutation(
        "A search leaves out rows that float32 puts behind the last one found.",
        "        near = (cosines >= (least - margin)[:, None]) & good",
        "        near = (cosines >= least[:, None]) & good",
        ("test_it_is_what_all_cosines_in_float64_give", "test_rows_that_float32_cannot_tell_apart_are_told_apart"),
    ),
    Mutation(
        "A row that does not find itself loses its nearest neighbour instead of the last.",
        "    excluded[~excluded.any(1), -1] = True",
        "    own[~own.any(1), 0] = True",
        ("test_where_all_rows_are_equal_the_first_are_nearest", "test_it_is_what_all_cosines_in_float64_give"),
    ),
    Mutation(
        "Statistics of two batches leave out how far their means are apart.",
        "    return total, middle, m2.sum(0) + (count * (mean - middle) ** 2).sum(0)",
        "    return total, middle, m2.sum(0)",
        ("test_statistics_in_one_pass_are_numpys_in_two",),
    ),
    Mutation(
        "Layers that only follow a dead channel are called dead, too.",
        "        new = dead - before.get(numbers.channels, set())",
        "        new = dead",
        ("test_each_fault_is_found_and_nothing_else",),
    ),
    # Several workers, and the command line
    Mutation(
        "A home folder in a config file is a folder called ~.",
        '    if text != "~" and not text.startswith("~/"):',
        "    if True:",
        ("test_a_home_folder_in_a_config_file_is_that_of_the_user",),
    ),
    Mutation(
        "A run is bound by any stage that takes more than a fifth of its time.",
        '"write": summary.write_wait_s',
        '"write": stages["write"]',
        ("test_a_run_is_bound_by_what_its_forward_waits_for_and_else_by_the_largest_stage",),
    ),
    Mutation(
        "A shard that killed its worker is not built again.",
        "                    engine.submit(event.shard)\n",
        "                    pass\n",
        ("test_each_shard_is_built_once_whatever_ends_the_workers",),
    ),
    Mutation(
        "A shard is given up after two attempts.",
        "                if len(reasons[event.shard]) < _ATTEMPTS:",
        "                if len(reasons[event.shard]) < _ATTEMPTS - 1:",
        ("test_each_shard_is_built_once_whatever_ends_the_workers",),
    ),
    Mutation(
        "A locked data set ends the command with the exit code of wrong usage.",
        "4 if isinstance(error, LockedError) else 2 if",
        "2 if isinstance(error, LockedError) else 2 if",
        ("test_another_run_on_the_same_output_exits_with_4",),
    ),
    Mutation(
        "A run in which every image failed ends as if it had succeeded.",
        "    if len(outcome.failures) == outcome.summary.n_rows:",
        "    if len(outcome.failures) > outcome.summary.n_rows:",
        ("test_a_run_in_which_every_row_failed_has_failed",),
    ),
    Mutation(
        "The fragment of a URL is stored with its token.",
        "_kept(query_mark, query, of_azure_functions) + _kept(fragment_mark, fragment, of_azure_functions)",
        "_kept(query_mark, query, of_azure_functions) + fragment_mark + fragment",
        ("test_a_url_is_the_same_on_both_days_and_has_no_secret",),
    ),
    Mutation(
        "A command opens any URL that a data set names.",
        "    if not images and (servers := _servers(root, paths)):",
        "    if images and (servers := _servers(root, paths)):",
        ("test_no_request_is_sent_before_the_user_has_named_the_location",),
    ),
)  # fmt: skip


class MutationError(Exception):
    """A fault or a test of it cannot be found."""


def place_of(mutation: Mutation, root: Path) -> Path:
    """The file that has the text of a fault.

    Raises:
        MutationError: there is none, or it has the text more than once.
    """
    places = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            places += [path] * path.read_text(encoding="utf-8").count(mutation.old)
    if len(places) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in places) or "nowhere"
        raise MutationError(
            f"{mutation.name} Its text is found {len(places)} times ({where}), not once: {mutation.old!r}"
        )
    return places[0]


def files_of_tests(root: Path) -> dict[str, list[Path]]:
    """Name of a test function -> the files that have one of this name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


def tests_of(mutation: Mutation, files: dict[str, list[Path]], root: Path) -> list[str]:
    """Node ids of the tests of a fault.

    Raises:
        MutationError: a test is not found, or more than once.
    """
    found = []
    for name in mutation.tests:
        if len(files.get(name, [])) != 1:
            raise MutationError(f"{mutation.name} The test {name} is found {len(files.get(name, []))} times, not once")
        found.append(f"{files[name][0].relative_to(root)}::{name}")
    return found


def copied(to: Path) -> Path:
    """A copy of the checkout: all files that git does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    root = to / "checkout"
    for name in filter(None, names):
        if (CHECKOUT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, root / name)
    if (CHECKOUT.parent / "shared").is_dir():
        (to / "shared").symlink_to(CHECKOUT.parent / "shared")
    return root


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code of pytest, and the first test that failed, or why there is none."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TEST_S)
    except subprocess.TimeoutExpired:
        return 1, "a test that does not end"
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*::)?(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr).strip().splitlines()[-1]


def run(mutations: Sequence[Mutation], *, all_tests: bool) -> int:
    """Put in one fault after the other, and print a line for each; returns how many were not noticed.

    Raises:
        MutationError: a fault or a test cannot be found, or tests fail without any fault.
    """
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        root = copied(Path(folder))
        places = [place_of(mutation, root) for mutation in mutations]
        files = files_of_tests(root)
        tests = [tests_of(mutation, files, root) for mutation in mutations]
        code, why = run_tests(root, [] if all_tests else sorted({test for some in tests for test in some}))
        if code:
            raise MutationError(f"without any fault, pytest ends with {code}: {why}")
        for mutation, place, some in zip(mutations, places, tests, strict=True):
            source, start = place.read_text(encoding="utf-8"), time.monotonic()
            place.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
            code, why = run_tests(root, [] if all_tests else some)
            place.write_text(source, encoding="utf-8")
            noticed = code == 1
            missed += not noticed
            verdict = f"caught by {why}" if noticed else f"NOT CAUGHT (pytest ended with {code}: {why})"
            print(f"{mutation.name}\n    -> {verdict}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} faults are caught")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="or a part of a name; all faults without any")
    parser.add_argument("--all-tests", action="store_true", help="run all default tests for each fault")
    parser.add_argument("--list", action="store_true", help="only tell which faults there are")
    arguments = parser.parse_args()
    chosen = [one for one in MUTATIONS if not arguments.names or any(name in one.name for name in arguments.names)]
    errors, files = [], files_of_tests(CHECKOUT)
    for mutation in chosen:
        try:
            place, tests = place_of(mutation, CHECKOUT), tests_of(mutation, files, CHECKOUT)
            if arguments.list:
                print(f"{mutation.name}\n    {place.relative_to(CHECKOUT)}: {', '.join(tests)}")
        except MutationError as error:
            errors.append(str(error))
    if not chosen:
        errors.append(f"no fault has a name with {' or '.join(arguments.names)}")
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 2
    if arguments.list:
        return 0
    try:
        return 1 if run(chosen, all_tests=arguments.all_tests) else 0
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
