CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	folder TEXT NOT NULL, 
	ranks INTEGER NOT NULL, 
	first_step INTEGER NOT NULL, 
	last_step INTEGER NOT NULL, 
	made_progress BOOLEAN, 
	outcome VARCHAR(32), 
	cause TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE, 
	CONSTRAINT uq_attempts_session_id UNIQUE (session_id, number)
);

CREATE TABLE charges (
	id INTEGER NOT NULL, 
	session_id INTEGER, 
	accelerator VARCHAR(64) NOT NULL, 
	factor DOUBLE NOT NULL, 
	started_at DATETIME NOT NULL, 
	used_s DOUBLE NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, why TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_charges PRIMARY KEY (id), 
	CONSTRAINT fk_charges_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);

CREATE TABLE checkpoints (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	stage VARCHAR(128) NOT NULL, 
	step INTEGER NOT NULL, 
	final BOOLEAN NOT NULL, 
	path TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	save_duration_s DOUBLE NOT NULL, 
	blocking_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	verified_at DATETIME, source TEXT DEFAULT '' NOT NULL, measured JSON DEFAULT '{}' NOT NULL, best VARCHAR(200) DEFAULT '' NOT NULL, pinned BOOLEAN DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (id), 
	CONSTRAINT fk_checkpoints_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_checkpoints_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL, 
	CONSTRAINT uq_checkpoints_path UNIQUE (path)
);

CREATE TABLE curves (
	id INTEGER NOT NULL, 
	attempt_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	lines TEXT NOT NULL, 
	CONSTRAINT pk_curves PRIMARY KEY (id), 
	CONSTRAINT fk_curves_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id) ON DELETE CASCADE, 
	CONSTRAINT uq_curves_attempt_id UNIQUE (attempt_id, number)
);

CREATE TABLE events (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	at DATETIME NOT NULL, 
	kind VARCHAR(48) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	facts JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT fk_events_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_events_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);

CREATE TABLE machines (
	name VARCHAR(64) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	home TEXT NOT NULL, 
	state_id VARCHAR(64) NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	gpus JSON NOT NULL, 
	daemon_pid INTEGER, 
	seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_machines PRIMARY KEY (name)
);

CREATE TABLE pools (
	name VARCHAR(64) NOT NULL, 
	total_s DOUBLE NOT NULL, 
	resets TEXT NOT NULL, 
	reserve_s DOUBLE NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_pools PRIMARY KEY (name)
);

CREATE TABLE remote_bundles (
	id INTEGER NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	account VARCHAR(128) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	reference TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	stored_at DATETIME NOT NULL, 
	ready_at DATETIME, 
	CONSTRAINT pk_remote_bundles PRIMARY KEY (id), 
	CONSTRAINT uq_remote_bundles_place UNIQUE (place, account, name)
);

CREATE TABLE remote_sessions (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	account VARCHAR(128) NOT NULL, 
	name VARCHAR(50) NOT NULL, 
	nonce VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	wait VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	due_at DATETIME NOT NULL, 
	created_at DATETIME NOT NULL, 
	source INTEGER NOT NULL, 
	expected_position INTEGER NOT NULL, 
	expected_step INTEGER NOT NULL, 
	session_s INTEGER NOT NULL, 
	timeout_s INTEGER NOT NULL, 
	bundle TEXT NOT NULL, 
	reference TEXT NOT NULL, 
	url TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	tries INTEGER NOT NULL, 
	refusals INTEGER NOT NULL, 
	absences INTEGER NOT NULL, 
	absent_since DATETIME, 
	pushed_at DATETIME, 
	running_at DATETIME, 
	status VARCHAR(16) NOT NULL, 
	status_at DATETIME, 
	is_last BOOLEAN NOT NULL, 
	queue_told INTEGER NOT NULL, 
	outcome VARCHAR(16) NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	reached_position INTEGER NOT NULL, 
	reached_step INTEGER NOT NULL, 
	fruitless INTEGER NOT NULL, 
	unprepared INTEGER NOT NULL, 
	first_cause TEXT NOT NULL, 
	record JSON NOT NULL, 
	quota_used_s DOUBLE, 
	factor DOUBLE, 
	deleted_at DATETIME, 
	CONSTRAINT pk_remote_sessions PRIMARY KEY (id), 
	CONSTRAINT fk_remote_sessions_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_remote_sessions_name UNIQUE (name), 
	CONSTRAINT uq_remote_sessions_run_id UNIQUE (run_id, number)
);

CREATE TABLE "resumes" (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	site VARCHAR(32) NOT NULL, 
	due_at DATETIME, 
	why TEXT NOT NULL, 
	failed_starts INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	claimed_by VARCHAR(128) NOT NULL, 
	claimed_at DATETIME, 
	created_at DATETIME NOT NULL, 
	priority INTEGER DEFAULT '0' NOT NULL, 
	claimant_pid INTEGER, 
	claimant_started_ticks BIGINT, 
	claimant_boot_id VARCHAR(64) DEFAULT '' NOT NULL, 
	lease_expires_at DATETIME, 
	last_error TEXT DEFAULT '' NOT NULL, 
	ranks INTEGER, 
	share BOOLEAN DEFAULT 0 NOT NULL, 
	last_session_at DATETIME, reason VARCHAR(16) DEFAULT '' NOT NULL, claimant_machine VARCHAR(64) DEFAULT '' NOT NULL, mirrored BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_resumes PRIMARY KEY (id), 
	CONSTRAINT fk_resumes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);

CREATE TABLE rungs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	session_id INTEGER, 
	plan_hash VARCHAR(64) NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	device VARCHAR(128) NOT NULL, 
	world_size INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	step INTEGER NOT NULL, 
	rung TEXT NOT NULL, 
	why TEXT NOT NULL, 
	up BOOLEAN NOT NULL, 
	changes_result BOOLEAN NOT NULL, 
	settings JSON NOT NULL, 
	CONSTRAINT pk_rungs PRIMARY KEY (id), 
	CONSTRAINT fk_rungs_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_rungs_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL
);

CREATE TABLE runs (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	number INTEGER NOT NULL, 
	folder TEXT NOT NULL, 
	workdir TEXT NOT NULL, 
	checkpoints TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	overrides JSON NOT NULL, 
	plan_hash VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, pool VARCHAR(64) DEFAULT '' NOT NULL, machine VARCHAR(64) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT uq_runs_name UNIQUE (name, number)
);

CREATE TABLE samples (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	span_s INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT pk_samples PRIMARY KEY (id), 
	CONSTRAINT fk_samples_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);

CREATE TABLE sessions (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	site VARCHAR(32) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	wall_boottime_s DOUBLE, 
	wall_at DATETIME, 
	save_lead_s DOUBLE NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	supervisor_pid INTEGER, 
	supervisor_started_ticks BIGINT, 
	stage VARCHAR(128) NOT NULL, 
	first_step INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	epochs_total INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	steps_total INTEGER NOT NULL, 
	samples BIGINT NOT NULL, 
	step_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	heartbeat_at DATETIME, exactness JSON DEFAULT '{}' NOT NULL, wall_kind VARCHAR(64) DEFAULT '' NOT NULL, fixed_wall_boottime_s DOUBLE, fixed_wall_kind VARCHAR(64) DEFAULT '' NOT NULL, pool VARCHAR(64) DEFAULT '' NOT NULL, reason VARCHAR(16) DEFAULT '' NOT NULL, machine VARCHAR(64) DEFAULT '' NOT NULL, lease_expires_at DATETIME, 
	CONSTRAINT pk_sessions PRIMARY KEY (id), 
	CONSTRAINT fk_sessions_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_sessions_run_id UNIQUE (run_id, number)
);

CREATE TABLE slurm_jobs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	job VARCHAR(20) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	follows VARCHAR(20) NOT NULL, 
	requeue BOOLEAN NOT NULL, 
	state VARCHAR(24) NOT NULL, 
	reason VARCHAR(64) NOT NULL, 
	restarts INTEGER NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	starts_at DATETIME, 
	submitted_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	stop_at DATETIME, 
	ended_at DATETIME, 
	why TEXT NOT NULL, 
	CONSTRAINT pk_slurm_jobs PRIMARY KEY (id), 
	CONSTRAINT fk_slurm_jobs_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);

CREATE TABLE stages (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	position INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	finished_at DATETIME, 
	note TEXT NOT NULL, 
	CONSTRAINT pk_stages PRIMARY KEY (id), 
	CONSTRAINT fk_stages_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_stages_run_id UNIQUE (run_id, name)
);

CREATE INDEX ix_attempts_session_id_stage ON attempts (session_id, stage, last_step);

CREATE INDEX ix_charges_pool_started_at ON charges (pool, started_at);

CREATE INDEX ix_charges_session_id ON charges (session_id);

CREATE INDEX ix_charges_started_at ON charges (started_at);

CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);

CREATE INDEX ix_checkpoints_run_id_state ON checkpoints (run_id, state, stage, step);

CREATE INDEX ix_checkpoints_session_id ON checkpoints (session_id);

CREATE INDEX ix_events_run_id_id ON events (run_id, id);

CREATE INDEX ix_events_run_id_kind ON events (run_id, kind, id);

CREATE INDEX ix_events_session_id_kind ON events (session_id, kind, id);

CREATE INDEX ix_remote_sessions_state_due_at ON remote_sessions (state, due_at);

CREATE INDEX ix_resumes_due_at ON resumes (due_at);

CREATE INDEX ix_resumes_run_id ON resumes (run_id);

CREATE INDEX ix_resumes_run_id_state ON resumes (run_id, state);

CREATE INDEX ix_resumes_share_state_due_at ON resumes (share, state, due_at);

CREATE INDEX ix_resumes_state ON resumes (state);

CREATE INDEX ix_resumes_state_due_at ON resumes (state, due_at);

CREATE INDEX ix_rungs_plan ON rungs (plan_hash, stage, device, world_size);

CREATE INDEX ix_rungs_run_id_id ON rungs (run_id, id);

CREATE INDEX ix_runs_created_at ON runs (created_at);

CREATE INDEX ix_runs_state_created_at ON runs (state, created_at);

CREATE INDEX ix_samples_session_span_at ON samples (session_id, span_s, at);

CREATE INDEX ix_sessions_phase ON sessions (phase);

CREATE INDEX ix_slurm_jobs_run_id_id ON slurm_jobs (run_id, id);

CREATE UNIQUE INDEX uq_remote_sessions_open ON remote_sessions (run_id) WHERE state IN ('planned', 'bundling', 'pushing', 'asking', 'queued', 'running', 'ended');

CREATE UNIQUE INDEX uq_resumes_waiting ON resumes (run_id) WHERE state IN ('due', 'claimed');

CREATE UNIQUE INDEX uq_slurm_jobs_open ON slurm_jobs (run_id) WHERE ended_at IS NULL;

INSERT INTO alembic_version VALUES ('0015');
