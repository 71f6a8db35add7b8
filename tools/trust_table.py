"""Write docs/trust.md: what was tried against runs, files and servers, and what came of it.

python tools/trust_table.py            # write docs/trust.md
python tools/trust_table.py --print    # print it
python tools/trust_table.py --tests    # print the tests that it names, for pytest

Counted from the committed results of `benchmarks/kill.py`, `benchmarks/long_run.py` and `make trust`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.titles import ALGORITHMS  # noqa: E402

PAGE = ROOT / "docs/trust.md"
RESULTS = ROOT / "benchmarks/results"

NAMES = ALGORITHMS | {"grpo_server": "GRPO with `url: auto`"}

WAYS = ("SIGKILL", "SIGKILL, writing", "SIGTERM", "SIGHUP", "SLURM", "server")

HEAD = """# Trials

Runs, servers and readers of files under kills, hostile inputs and long use, with the counts. The command
`python tools/trust_table.py` writes this page from the committed results; [SECURITY.md](../SECURITY.md) describes who
can reach what.

## Kills

{trials} runs were killed {run_kills} times, {server_kills} more times a process of their reward server was. They were
resumed with `resume=auto` and finished. {same} of them ended with the same weights, EMA weights, snapshots, optimizer,
counters and metrics as a run that nobody killed, bitwise.

| run | {ways} | in all |
|---|{rules}|---|
{kills}

- **SIGKILL, writing**: while a checkpoint was written. **SLURM**: SIGTERM, then
  SIGKILL after a deadline of up to a second. **server**: SIGKILL of a process of the reward server of the run.
- SIGTERM and SIGHUP ended the run with exit code 3 and without a traceback, once its imports were done.
- {items:,} images were sent to a reward server while {reward_kills} of its processes were killed or frozen
  ({reward_ways}): {scored:,} were scored, {wrong} wrongly; {failed} failed after all retries, as typed failures.

```console
$ OMP_NUM_THREADS=1 python benchmarks/kill.py {kill_arguments}
```

## Fuzzing

{cases:,} mutated inputs: {tracebacks} tracebacks, {hangs} hangs over {longest_s} s, {over_memory} cases over
{most_mb} MiB, {failed_tests} tests that failed. The inputs that once failed are kept in
[tests/fuzz/corpus](../tests/fuzz/corpus), and tried every time.

| input | cases |
|---|---|
{fuzz}

```console
$ make trust
```

## Long runs

| measured over | | mean | growth over the run | 95 % interval of the slope |
|---|---|---|---|---|
{long}

Growth is the slope of the least-squares line times the length of the run, without its first tenth. Handles and threads
are flat. Within their intervals so are times, and the memory of the server, which returns freed memory to the system.
The memory of the other processes grows by less than 1 %.

```console
$ OMP_NUM_THREADS=1 python benchmarks/long_run.py {long_arguments}
```

## Disturbances

| disturbance | test |
|---|---|
{tests}

## Findings of a trial from outside

| finding | trial | test |
|---|---|---|
{eleven}

```console
$ python -m pytest $(python tools/trust_table.py --tests)
```

The command runs every test of this page.

## Faults that later trials showed

Each was mended; the test failed before. Inputs that fuzzing found are in [tests/fuzz/corpus](../tests/fuzz/corpus).

| fault | test |
|---|---|
{findings}
"""

TESTS = {
    "The disk is full: every library that writes, checkpoints, images, exports": (
        "test_disk.py",
        "test_every_library_that_cannot_write",
    ),
    "The disk is full when a checkpoint is saved": (
        "test_disk.py",
        "test_a_disk_that_is_full_when_a_checkpoint_is_saved",
    ),
    "A folder is read-only, or a file stands in its place": ("test_disk.py", "test_a_folder_that_is_read_only"),
    "Folders of the run vanish while it trains": ("test_disturbances.py", "test_a_folder_of_the_run_that_vanishes"),
    "The data vanishes while a run trains": (
        "test_disturbances.py",
        "test_data_that_vanishes_ends_the_run_with_its_name",
    ),
    "Two processes start in one run directory": ("test_disturbances.py", "test_two_processes_that_start_at_once"),
    "The clock jumps by a year": ("test_disturbances.py", "test_a_clock_that_jumps_changes_nothing"),
    "A reward server fails, resets, drips, and answers wrongly, at random": (
        "rewards/test_faults.py",
        "test_requests_under_random_faults",
    ),
    "A reply has wrong ids, duplicates, NaN, strings": (
        "rewards/test_client.py",
        "test_a_reply_that_breaks_the_protocol_is_never_a_number",
    ),
    "A server redirects to another host": ("rewards/test_client.py", "test_what_will_not_pass_is_asked_once"),
    "A server never answers, or answers byte by byte": (
        "rewards/test_client.py",
        "test_no_server_holds_a_caller_beyond_the_deadline",
    ),
    "A reply never ends, or is compressed": ("rewards/test_client.py", "test_a_reply_without_end_is_cut_off"),
    "A worker freezes": ("rewards/test_supervision.py", "test_a_frozen_worker_is_replaced_within_seconds"),
    "Hostile bodies reach a server": ("rewards/test_serving.py", "test_hostile_bodies_are_refused_in_bounded_memory"),
    "A gradient is NaN or Inf": (
        "algorithms/test_diverged.py",
        "test_a_run_ends_with_the_examples_and_its_checkpoint_repeats_the_step",
    ),
    "Secrets are in the environment of everything that runs": ("test_secrets.py", "test_a_secret_is_in_no_file"),
    "Files try to run code": ("test_safety.py", "test_the_package_is_safe"),
}
"""Disturbance -> (file below tests/, test)."""

ELEVEN = {
    "Wrong numbers reached training as valid scores": {
        "a batch that was written in part, at every byte": (
            "rewards/test_supervision.py",
            "test_a_batch_that_was_written_in_part_ends_the_worker",
        ),
        "a reply to another batch": ("rewards/test_supervision.py", "test_a_reply_to_another_batch_is_no_score"),
        "a flipped bit of a frame": ("rewards/test_serving.py", "test_a_frame_with_a_flipped_bit_is_broken"),
    },
    "A flipped byte in a checkpoint was not detected": {
        "every file, one flipped bit": (
            "engine/test_integrity.py",
            "test_one_flipped_bit_is_found_and_its_file_is_named",
        ),
        "a missing file": ("engine/test_integrity.py", "test_a_missing_file_is_named"),
        "NaN or Inf in weights or moments": ("engine/test_integrity.py", "test_weights_and_moments_are_finite"),
        "a `state.json` that no run wrote": ("engine/test_integrity.py", "test_a_state_that_no_run_wrote_is_refused"),
        "an archive that grows": ("engine/test_integrity.py", "test_an_archive_that_grows_is_refused_unread"),
    },
    "A small request made gigabytes": {
        "names of rewards": ("rewards/test_serving.py", "test_names_of_rewards_are_bounded"),
        "pixels of a request": (
            "rewards/test_serving.py",
            "test_pictures_beyond_the_pixels_of_a_request_fail_before_they_are_decoded",
        ),
        "pixels of all requests": ("rewards/test_serving.py", "test_pixels_of_all_requests_together_are_bounded"),
        "large images at once": ("rewards/test_serving.py", "test_large_images_are_decoded_one_after_the_other"),
        "no memory to decode": ("rewards/test_serving.py", "test_no_memory_to_decode_is_no_fault_of_the_picture"),
    },
    "A frozen worker was never noticed": {
        "SIGSTOP": ("rewards/test_supervision.py", "test_a_frozen_worker_is_replaced_within_seconds"),
    },
    "Unfinished bodies held every place of a server": {
        "64 bodies": ("rewards/test_serving.py", "test_bodies_that_do_not_come_hold_no_place"),
        "headers": ("rewards/test_serving.py", "test_headers_that_do_not_come_end_the_connection"),
    },
    "The client bounded no reply": {
        "gzip": ("rewards/test_client.py", "test_a_compressed_reply_is_not_unpacked"),
        "a reply without end": ("rewards/test_client.py", "test_a_reply_without_end_is_cut_off"),
        "messages, with the token": (
            "rewards/test_client.py",
            "test_words_of_a_server_are_one_short_line_without_the_token",
        ),
        "details, with escape sequences": ("rewards/test_client.py", "test_a_detail_is_plain_text_without_the_token"),
    },
    "The declared range of a scorer was not enforced": {
        "a value outside": ("rewards/test_protocol.py", "test_a_value_outside_the_declared_range_is_a_failure"),
        "a value outside what the server declares": (
            "rewards/test_client.py",
            "test_a_value_outside_the_range_that_its_server_declares_is_a_failure",
        ),
        "advantages of the largest floats": ("core/test_advantages.py", "test_the_largest_floats_do_not_overflow"),
    },
    "Modules of the working directory were imported": {
        "front and worker": ("rewards/test_supervision.py", "test_programs_of_the_working_directory_do_not_run"),
    },
    "Tracebacks and hangs": {
        "weights that torch cannot read": (
            "engine/test_integrity.py",
            "test_whatever_a_damaged_file_makes_torch_raise_is_one_error",
        ),
        "adapters, embeddings, states": ("fuzz/test_weights.py", "test_pickles"),
        "`complete.json`": ("engine/test_integrity.py", "test_a_damaged_list_of_files_is_no_traceback"),
        "run files: digits, tags, anchors, depth, aliases": (
            "config/test_load.py",
            "test_hostile_run_files_are_one_message",
        ),
        "run files: a chain of `extends`": ("config/test_load.py", "test_a_long_chain_of_files_is_refused"),
        "counts of 10³⁰": ("config/test_rules.py", "test_a_value_out_of_bounds"),
        "lists: null bytes, surrogates, depth": ("fuzz/test_data.py", "test_corpus"),
        "names over 255 bytes": ("test_bad_input.py", "test_names_that_no_file_can_have"),
        "links that lead to themselves": ("test_bad_input.py", "test_links_that_lead_to_themselves"),
        "pipes": ("test_bad_input.py", "test_a_pipe_is_not_waited_for"),
        "`--url /dev/zero`": ("test_bad_input.py", "test_a_device_is_no_endpoints_file"),
        "`--length 1000000`": ("test_bad_input.py", "test_commands_and_options_that_do_not_exist"),
    },
    "Scalars of run files were not those of YAML 1.2": {
        "`010`, `1:30`, `1_000`, `0o10`": ("config/test_load.py", "test_scalars_are_those_of_yaml_1_2"),
    },
    "Signals, logs, links and web pages": {
        "SIGTERM, SIGHUP while a model loads": ("test_bad_input.py", "test_a_signal_while_the_model_loads_is_a_stop"),
        "SIGTERM while rewards are computed": (
            "algorithms/test_grpo.py",
            "test_a_signal_while_rewards_are_computed_stops_before_they_are_in",
        ),
        "SIGTERM in training": ("algorithms/test_resume.py", "test_sigterm_stops_cleanly_and_resumes_bitwise"),
        "the server of `url: auto`": (
            "rewards/test_launch.py",
            "test_a_server_of_a_run_that_is_killed_is_started_again_on_its_port",
        ),
        "uploads that are broken off": ("rewards/test_serving.py", "test_uploads_that_are_broken_off_are_not_logged"),
        "a list with only prompts and masks": ("data/test_prompts.py", "test_validate_refuses_a_mask_without_an_image"),
        "a link beside the endpoints file": (
            "rewards/test_endpoints.py",
            "test_a_link_beside_the_file_is_not_followed",
        ),
        "a web page: content types": ("rewards/test_server.py", "test_415_for_bodies_that_any_web_page_may_send"),
        "a web page: hosts, origins": (
            "rewards/test_server.py",
            "test_without_a_token_only_programs_of_this_machine_are_answered",
        ),
    },
}
"""Finding of the trial from outside -> what was tried -> (file below tests/, test)."""

FINDINGS = {
    "A run that was killed in its last checkpoint repeated its last evaluation twice": (
        "algorithms/test_resume.py",
        "test_a_run_stopped_in_its_last_step_can_still_be_extended_bitwise",
    ),
    "A signal that torchrun passes on ended the run without a checkpoint": (
        "test_stopping.py",
        "test_a_signal_that_a_launcher_passes_on_is_the_same_request",
    ),
    "A number that no float holds, or half of a surrogate pair, in a detail ended a run with a traceback": (
        "rewards/test_client.py",
        "test_a_reply_that_breaks_the_protocol_is_never_a_number",
    ),
    "A detail of thousands of keys filled the log": (
        "rewards/test_client.py",
        "test_neither_or_both_of_score_and_error_fails_alone",
    ),
    "A value outside the range of a revision that its server took up later trained": (
        "rewards/test_client.py",
        "test_the_range_of_another_revision_is_read_again",
    ),
    "Large images that waited to be decoded held up batches": (
        "rewards/test_serving.py",
        "test_images_that_wait_to_be_decoded_hold_no_batch_up",
    ),
    "200 MB of text in an image made gigabytes": ("rewards/test_serving.py", "test_the_metadata_of_a_file_is_bounded"),
    "Names of the rewards of a server passed to the terminal as they were": (
        "rewards/test_client.py",
        "test_names_of_rewards_of_a_server_are_one_short_line",
    ),
    "A server that reported another revision with every reply filled memory and log": (
        "rewards/test_client.py",
        "test_a_server_that_reports_another_revision_every_time",
    ),
    "Cookies of a server were kept, and sent with every request": (
        "rewards/test_client.py",
        "test_cookies_of_a_server_are_not_kept",
    ),
    "A damaged row of the cache of scores ended a run with a traceback": (
        "rewards/test_faults.py",
        "test_a_damaged_row_of_the_cache_is_asked_again",
    ),
    "A report of a run with damaged files ended in a traceback": (
        "observe/test_report.py",
        "test_files_that_are_not_of_a_run",
    ),
    "A pipe in place of a file of a run directory was waited for": (
        "observe/test_run_dir.py",
        "test_what_is_no_file_is_not_waited_for",
    ),
    "An error within a reply of status 200, or a judge that was loading, ended a run as wrong usage": (
        "rewards/test_judge_replies.py",
        "test_an_outage_at_the_start_is_no_wrong_usage",
    ),
    "Two different verdicts in one answer of a judge": (
        "rewards/test_judge_replies.py",
        "test_verdicts_that_are_none",
    ),
    "`eval`, `sample` and `check` imported the modules that a copied run directory names, and sent it tokens": (
        "test_run_directories.py",
        "test_no_command_uses_what_a_copied_run_names",
    ),
    "`compare` and `export` imported the modules that a run directory names": (
        "test_run_directories.py",
        "test_logs_are_compared_and_weights_exported_without_the_code_of_the_run",
    ),
    "Inside a run directory, libraries imported the modules that lie in it": (
        "test_run_directories.py",
        "test_modules_in_a_run_directory_are_not_found_by_libraries",
    ),
    "A run that was resumed in a copied directory wrote through links": (
        "test_run_directories.py",
        "test_nothing_is_written_through_a_link",
    ),
    "An override of 5,000 nested keys ended in a traceback": ("test_bad_input.py", "test_overrides_that_are_none"),
    "Labels with a number that no float holds ended in a traceback": (
        "rewards/test_probe.py",
        "test_labels_that_cannot_be_read",
    ),
    "A client held 400 KB for the requests of a minute": (
        "rewards/test_faults.py",
        "test_the_memory_of_the_budget_does_not_grow_with_the_requests",
    ),
    "Freed memory stayed with the server": (
        "test_machine.py",
        "test_freed_memory_is_returned_to_the_system",
    ),
    "A damaged state of a checkpoint ended `export`, `sample` and `eval` in a traceback, or held them up": (
        "test_use.py",
        "test_a_damaged_state_of_a_checkpoint_is_one_line",
    ),
    "A flipped bit in the checkpoint that an initial adapter came from was not detected": (
        "test_use.py",
        "test_a_flipped_bit_is_found_wherever_weights_of_a_checkpoint_are_named",
    ),
    "A checkpoint whose list of files was emptied, or to which tensors were added, was loaded": (
        "engine/test_integrity.py",
        "test_tensors_that_were_added_are_named",
    ),
    "A device in place of a file of a checkpoint was read without end": (
        "engine/test_integrity.py",
        "test_a_pipe_or_a_device_in_place_of_the_state_is_not_read",
    ),
    "The run file within a damaged state ended a resume in a traceback": (
        "engine/test_integrity.py",
        "test_a_run_file_of_a_state_that_is_none",
    ),
    "A style adapter with NaN was noticed at the first gradient": (
        "adapters/test_formats.py",
        "test_a_file_that_is_not_whole_is_refused_before_the_model_is_touched",
    ),
    "Two `retouch reward env` for one folder ran into each other": (
        "rewards/test_environments.py",
        "test_one_process_makes_an_environment_at_a_time",
    ),
    "A LoRA with factors of another number of dimensions, or a config that is none, ended in a traceback": (
        "adapters/test_initial_lora.py",
        "test_a_lora_config_that_is_none_is_refused",
    ),
    "A LoRA of integers was cut to whole numbers, one of NaN trained until its first gradient": (
        "adapters/test_initial_lora.py",
        "test_a_file_that_does_not_fit_is_refused",
    ),
    "A flipped bit in precomputed embeddings was not detected, other tensors in them ended in a traceback": (
        "families/test_embeddings.py",
        "test_an_entry_that_was_changed_is_not_used",
    ),
    "A pipe in place of a file of embeddings was waited for": (
        "families/test_embeddings.py",
        "test_a_pipe_in_place_of_the_identity_is_not_waited_for",
    ),
    "Too little memory, threads or file handles ended a command in a traceback": (
        "test_bad_input.py",
        "test_a_limit_of_the_machine_is_one_line",
    ),
    "A signal ended every command but `train` without a message, or as an error of a file that it could not read": (
        "test_bad_input.py",
        "test_a_signal_ends_every_command_as_a_stop",
    ),
    "An export that was killed left a part of its files under its name": (
        "test_use.py",
        "test_an_export_appears_whole_or_not_at_all",
    ),
    "Two processes that sampled into one folder replaced images of each other": (
        "test_use.py",
        "test_two_processes_that_sample_into_one_folder",
    ),
    "A kill left half of an image, a list, a report or a run file": (
        "test_disk.py",
        "test_what_could_not_be_written_whole_leaves_nothing",
    ),
    "Paths in a list of data passed escape sequences to terminal and log": (
        "test_bad_input.py",
        "test_names_in_data_do_not_change_the_terminal",
    ),
    "A plug-in that ends the program made a command end with success": (
        "config/test_plugins.py",
        "test_the_message_about_a_plugin_that_cannot_be_imported_names_its_own_remedy",
    ),
    "Two processes that wrote signs or edits into one folder mixed their images": (
        "data/test_synth.py",
        "test_two_processes_do_not_mix_their_images_in_one_folder",
    ),
    "A number of over 4,300 digits in a list ended in a traceback": ("fuzz/test_data.py", "test_corpus"),
    "A changed number in the scores on record of a benchmark was read as a score, or ended in a traceback": (
        "benchmarks_room/test_hostile.py",
        "test_a_score_on_record_that_was_changed_is_scored_again",
    ),
    "A pipe or a device in place of the scores on record was read without end": (
        "benchmarks_room/test_hostile.py",
        "test_what_is_no_file_in_place_of_scores_is_not_read",
    ),
    "Two processes that sampled a benchmark with different settings into one folder mixed their images": (
        "benchmarks_room/test_hostile.py",
        "test_of_processes_with_different_settings_one_gets_the_folder",
    ),
    "Images of a folder without a record were taken for those of the weights": (
        "benchmarks_room/test_hostile.py",
        "test_images_without_a_record_are_of_unknown_weights",
    ),
    "A folder in place of a file, or a link to nothing in place of a folder, ended in a traceback": (
        "benchmarks_room/test_hostile.py",
        "test_a_folder_in_place_of_a_result",
    ),
    "A folder of images whose name is not UTF-8 ended in a traceback after all was scored": (
        "benchmarks_room/test_hostile.py",
        "test_a_folder_whose_name_is_not_utf_8",
    ),
    "Numbers of images ended in a traceback, or took all memory": (
        "benchmarks_room/test_hostile.py",
        "test_numbers_of_images_that_are_none",
    ),
    "Details of a function that are not those of its benchmark ended in a traceback": (
        "benchmarks_room/test_hostile.py",
        "test_a_function_with_other_details_is_one_line",
    ),
    "`venv.py` or `pip.py` in the working directory was run by `retouch reward env`": (
        "rewards/test_environments.py",
        "test_programs_of_the_working_directory_do_not_run",
    ),
    "Errors of pip that are not UTF-8, or a missing program, ended in a traceback, and long ones filled the memory": (
        "rewards/test_environments.py",
        "test_a_program_that_fails_is_one_line",
    ),
    "An image in PostScript was passed to Ghostscript, which runs it": (
        "test_bad_input.py",
        "test_an_image_that_is_a_program_is_not_run",
    ),
    "Eight large images of another program took gigabytes in `retouch eval --benchmark`": (
        "benchmarks_room/test_hostile.py",
        "test_large_images_are_scored_in_bounded_memory",
    ),
    "Texts that are not UTF-8, endless edges and sizes of 5,000 digits ended `retouch sample` in a traceback": (
        "test_bad_input.py",
        "test_options_of_samples_out_of_range",
    ),
    "`retouch tiny build` trained before it looked at its folder, and two processes shared one": (
        "test_bad_input.py",
        "test_one_process_builds_a_tiny_base_into_an_empty_folder",
    ),
    "Gradients of a reward that nearly vanish ended a run as NaN": (
        "algorithms/test_gradient_weight.py",
        "test_gradients_that_nearly_vanish_have_a_quotient",
    ),
    "The gradient of a reward far outside its declared range trained": (
        "rewards/test_gradient.py",
        "test_one_failure_is_that_of_the_sample",
    ),
    "A pipe or a device in place of a table of data was read without end": (
        "benchmarks_room/test_hostile.py",
        "test_what_is_no_file_in_place_of_a_table_is_not_read",
    ),
    "A reader of the output that ended, a closed terminal or a full disk behind it ended a run": (
        "test_console.py",
        "test_a_run_trains_on_when_its_output_is_lost",
    ),
    "The same ended the process with exit code 120, or without a message": (
        "test_console.py",
        "test_no_library_ends_a_program_whose_output_nobody_reads",
    ),
    "A script that restarts runs ended when nobody read its messages": (
        "scripts/test_launchers.py",
        "test_the_monitor_goes_on_when_nobody_reads_its_messages",
    ),
    "SIGUSR1, which SLURM sends before the time limit, ended a run without a checkpoint": (
        "test_stopping.py",
        "test_a_notice_of_the_scheduler_is_no_first_of_two_requests",
    ),
    "SIGUSR1 ended a launcher and left its processes": (
        "scripts/test_launchers.py",
        "test_signals_reach_the_processes_of_a_launcher_as_sigterm",
    ),
    "SIGTERM to the demo left its training and its reward server running": (
        "examples/test_demo.py",
        "test_a_signal_to_the_demo_stops_its_training",
    ),
    "A process whose neighbour was killed ended in a traceback": (
        "scripts/test_launchers.py",
        "test_a_process_whose_neighbour_is_killed_ends_with_one_line",
    ),
    "A pickled or damaged text encoder, or a config of wrong types, ended in a traceback": (
        "families/test_unreadable.py",
        "test_weights_that_a_library_cannot_read",
    ),
    "An outage in the first evaluation left a checkpoint that could not be resumed": (
        "algorithms/test_first_stop.py",
        "test_an_outage_in_the_first_evaluation_is_resumed_bitwise",
    ),
    "A run that was begun from another run's checkpoint and stopped early began again from the base": (
        "algorithms/test_first_stop.py",
        "test_a_run_begun_from_another_does_not_begin_from_the_base",
    ),
    "A damaged file of an evaluation ended every start of a run in a traceback": (
        "algorithms/test_damaged_runs.py",
        "test_a_damaged_file_is_written_again_or_done_without_or_named",
    ),
    "Lost records of a run were not noticed": (
        "algorithms/test_damaged_runs.py",
        "test_records_that_are_lost_are_counted",
    ),
    "An evaluation in which every reward failed counted as done": (
        "algorithms/test_damaged_runs.py",
        "test_an_evaluation_in_which_every_reward_failed_is_repeated_when_the_run_is_resumed",
    ),
    "A server that raised in every batch, or answered with HTML, took the requests of a sound one": (
        "rewards/test_broken_servers.py",
        "test_a_broken_server_takes_no_traffic_from_a_sound_one",
    ),
    "A run did not start while one of the servers of a reward was broken": (
        "algorithms/test_readiness.py",
        "test_a_run_starts_without_a_server_whose_rewards_another_has",
    ),
    "A server whose breaker half-opened held a request up to its deadline": (
        "rewards/test_broken_servers.py",
        "test_a_server_whose_breaker_half_opens_holds_no_request_up",
    ),
    "A worker whose every batch raised stayed": (
        "rewards/test_recovery.py",
        "test_a_worker_whose_batches_all_raise_is_replaced",
    ),
    "A helper that a scorer had forked kept a server from its restart": (
        "rewards/test_recovery.py",
        "test_a_helper_that_a_scorer_forked_keeps_no_worker_from_its_restart",
    ),
    "Too few handles, or too little memory, for two seconds ended a server": (
        "rewards/test_recovery.py",
        "test_a_worker_that_cannot_be_started_is_tried_again",
    ),
    "Four deaths of a worker ended a server that had been ready": (
        "rewards/test_recovery.py",
        "test_a_server_that_was_ready_is_not_given_up",
    ),
    "The end of a frozen worker silenced its server for five seconds": (
        "rewards/test_recovery.py",
        "test_the_end_of_a_worker_does_not_hold_the_loop_up",
    ),
    "Idle connections without the token kept clients out, and filled the log": (
        "rewards/test_connections.py",
        "test_more_idle_connections_than_handles",
    ),
    "A body in chunks of one byte silenced a server for two seconds": (
        "rewards/test_connections.py",
        "test_chunks_of_one_byte_do_not_hold_the_loop",
    ),
    "Replies that nobody took stayed with the server": (
        "rewards/test_connections.py",
        "test_a_reply_that_nobody_takes_ends_its_connection",
    ),
    "The output of a scorer filled the log": (
        "rewards/test_recovery.py",
        "test_the_output_of_scorers_is_bounded_and_its_end_is_kept",
    ),
    "The count of operations ended the first forward of three families on a GPU": (
        "observe/test_cost.py",
        "test_flops_are_those_of_the_real_network",
    ),
    "Two rewards that loaded at once left bf16 as the default of the process, in which a run trained other numbers": (
        "algorithms/test_default_dtype.py",
        "test_the_bits_of_a_run_are_the_same_under_another_default",
    ),
    "Groups sampled in place of others were split over processes, though a reward compares whole groups": (
        "algorithms/test_whole_groups.py",
        "test_resampled_groups_have_the_values_of_one_process",
    ),
    "A run was resumed inside an epoch with other options than its rollouts were sampled with": (
        "algorithms/test_resume_options.py",
        "test_every_option_is_refused_or_run",
    ),
    "A run waited for rewards of weight 0": (
        "rewards/test_gates.py",
        "test_a_reward_of_weight_0_is_not_waited_for",
    ),
    "Trajectories of an epoch waited on the GPU": (
        "algorithms/test_waiting_on_the_cpu.py",
        "test_trajectories_of_an_epoch_wait_on_the_cpu",
    ),
    "Intervals of few pairs were too narrow": (
        "test_evaluate.py",
        "test_the_interval_of_a_paired_difference",
    ),
    "Retries of a judge changed the random state that checkpoints hold": (
        "test_defaults_of_torch.py",
        "test_no_number_comes_from_a_global_generator",
    ),
    "A parameter that the endpoint of a judge refuses ended a run": (
        "rewards/test_judge_replies.py",
        "test_refused_parameters_are_replaced_once_and_noted",
    ),
    "An exhausted quota of a judge was taken for a rate limit that passes": (
        "rewards/test_judge_replies.py",
        "test_an_account_without_quota_says_so_once",
    ),
    "An endpoint of Azure, with a query in its address and another header for the key, could not be used": (
        "rewards/test_judge_replies.py",
        "test_an_address_with_a_query_and_another_header",
    ),
    "During an outage of one reward, the others, a paid judge among them, were asked again with every attempt": (
        "rollout/test_settle.py",
        "test_a_reward_that_scored_an_image_is_not_asked_again_for_another_reward",
    ),
    "The cache returned scores of other options of a scorer": (
        "rewards/test_revisions.py",
        "test_a_scorer_that_names_no_revision_has_keys_by_its_options",
    ),
    "An override of a reward that a run does not have added it, and loaded 7 billion weights": (
        "config/test_load.py",
        "test_an_option_of_a_reward_that_the_run_does_not_have_is_refused",
    ),
    "A reward server rejected a body of `image` and `prompt` in plain JSON": (
        "rewards/test_plain_body.py",
        "test_the_pair_of_scores_and_their_weighted_sum",
    ),
    "The server of a run, killed after it had been ready, was given up when its next load failed": (
        "rewards/test_recovery.py",
        "test_a_supervisor_in_the_place_of_a_killed_one_knows_that_scorers_could_be_loaded",
    ),
}
"""Fault that later trials showed -> (file below tests/, test that failed before)."""

MEASURED = {
    "rss_mb": "memory, MB",
    "handles": "file handles",
    "threads": "threads",
    "step_s": "step time, s",
    "time_s": "time of 500 images, s",
}


def page() -> str:
    kill, long, fuzz = (_read(name) for name in ("kill", "long_run", "fuzz"))
    of_rewards = kill["rewards"]
    by_target = {target: Counter(ways) for target, ways in kill["by_target"].items()}
    failed = sum(of_rewards["failed"].values())
    return HEAD.format(
        trials=kill["runs"],
        run_kills=kill["kills_of_runs"],
        server_kills=sum(ways["server"] for ways in by_target.values()),
        kill_arguments=" ".join(kill["arguments"]),
        long_arguments=" ".join(long["arguments"]),
        same="All" if not kill["runs_that_differ"] else f"{kill['runs'] - kill['runs_that_differ']}",
        ways=" | ".join(WAYS),
        rules="|".join("---" for _ in WAYS),
        kills="\n".join(_kill_rows(by_target)),
        items=of_rewards["items"],
        reward_kills=sum(of_rewards["kills"].values()),
        reward_ways=", ".join(f"{way}: {count}" for way, count in sorted(of_rewards["kills"].items())),
        scored=of_rewards["scored"],
        wrong=of_rewards["wrong"],
        failed=failed,
        cases=fuzz["cases"],
        **{fault: fuzz[fault] for fault in ("tracebacks", "hangs", "over_memory", "failed_tests")},
        longest_s=fuzz["longest_s"],
        most_mb=fuzz["most_bytes"] >> 20,
        fuzz="\n".join(f"| {target} | {count:,} |" for target, count in fuzz["targets"].items()),
        long="\n".join([*_long_rows(f"{long['train']['steps']:,} steps", long["train"], ("", "")),
                        *_long_rows(f"{long['rewards']['images']:,} images", long["rewards"], ("client_", "client")),
                        *_long_rows(f"{long['rewards']['images']:,} images", long["rewards"], ("front_", "server")),
                        *_long_rows(f"{long['rewards']['images']:,} images", long["rewards"], ("worker_", "worker"))]),
        tests=_test_rows(TESTS),
        eleven=_eleven_rows(),
        findings=_test_rows(FINDINGS),
    )  # fmt: skip


def all_tests() -> list[tuple[str, str]]:
    """(file below tests/, test) of every row of the page."""
    eleven = [test for trials in ELEVEN.values() for test in trials.values()]
    return [*TESTS.values(), *eleven, *FINDINGS.values()]


def _eleven_rows() -> str:
    return "\n".join(
        f'| {number}. {finding} | {what} | [✓](../tests/{file} "{test}") |'
        for number, (finding, trials) in enumerate(ELEVEN.items(), 1)
        for what, (file, test) in trials.items()
    )


def _test_rows(tests: Mapping[str, tuple[str, str]]) -> str:
    return "\n".join(f'| {what} | [✓](../tests/{file} "{test}") |' for what, (file, test) in tests.items())


def _kill_rows(by_target: Mapping[str, Counter[str]]) -> list[str]:
    rows = [
        f"| {NAMES[target]} | {' | '.join(str(ways[way]) for way in WAYS)} | {sum(ways.values())} |"
        for target, ways in by_target.items()
    ]
    total = sum(by_target.values(), Counter[str]())
    return [*rows, f"| in all | {' | '.join(str(total[way]) for way in WAYS)} | {sum(total.values())} |"]


def _long_rows(over: str, found: Mapping[str, Any], part: tuple[str, str]) -> list[str]:
    prefix, name = part
    rows: list[str] = []
    for key, title in MEASURED.items():
        if (one := found.get(prefix + key)) is not None:
            low, high = one["interval_per_1000"]
            what = f"{name} {title}".strip()
            interval = f"{low:.3g} to {high:.3g} per 1,000"
            rows.append(f"| {over} | {what} | {one['mean']:.4g} | {one['growth']:.2g} | {interval} |")
    if prefix == "client_":
        rows += _long_rows(over, {"time_s": found["time_s"]}, ("", ""))
    return rows


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page())
    elif "--tests" in sys.argv:
        print("\n".join(f"tests/{file}::{test}" for file, test in sorted(set(all_tests()))))
    else:
        PAGE.write_text(page(), encoding="utf-8")
