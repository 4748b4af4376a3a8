BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(128) NOT NULL, 
	folder TEXT NOT NULL, 
	ranks INTEGER NOT NULL, 
	first_step INTEGER NOT NULL, 
	last_step INTEGER NOT NULL, 
	gained BOOLEAN, 
	outcome VARCHAR(32), 
	cause TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE, 
	CONSTRAINT uq_attempts_session_id UNIQUE (session_id, number)
);
INSERT INTO "attempts" VALUES(1,1,1,'train','/state/runs/ink/1/attempts/1.1',2,0,42,1,'suspended','','2026-11-20 20:04:31.660951','2026-11-20 20:04:31.665149');
CREATE TABLE charges (
	id INTEGER NOT NULL, 
	session_id INTEGER, 
	accelerator VARCHAR(64) NOT NULL, 
	factor DOUBLE NOT NULL, 
	from_at DATETIME NOT NULL, 
	used_s DOUBLE NOT NULL, 
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
	took_s DOUBLE NOT NULL, 
	blocking_s DOUBLE NOT NULL, 
	metrics JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	verified_at DATETIME, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (id), 
	CONSTRAINT fk_checkpoints_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_checkpoints_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE SET NULL, 
	CONSTRAINT uq_checkpoints_path UNIQUE (path)
);
INSERT INTO "checkpoints" VALUES(1,'r1',1,'train',42,0,'/state/runs/ink/1/checkpoints/train/step-00000042',1000,'verified','',0.5,0.1,'{"dice": 0.5}','2026-11-20 20:04:31.667775','2026-11-20 20:04:31.667863');
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
INSERT INTO "events" VALUES(1,'r1',1,'2026-11-20 20:04:31.669871','AttemptSuspended','suspended','{"why": "the wall"}');
CREATE TABLE resumes (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	place VARCHAR(32) NOT NULL, 
	due_at DATETIME, 
	why TEXT NOT NULL, 
	tries INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	claimed_by VARCHAR(128) NOT NULL, 
	claimed_at DATETIME, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_resumes PRIMARY KEY (id), 
	CONSTRAINT fk_resumes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "resumes" VALUES(1,'r1','local','2026-11-20 12:00:00.000000','the wall',0,'due','',NULL,'2026-11-20 20:04:31.671904');
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
	finished_at DATETIME, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT uq_runs_name UNIQUE (name, number)
);
INSERT INTO "runs" VALUES('r1','ink',1,'/state/runs/ink/1','/project','/state/runs/ink/1/checkpoints','name = "ink"','["session.wall=30s"]','0123456789abcdef','active','','2026-11-20 20:04:31.646281',NULL);
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
	place VARCHAR(32) NOT NULL, 
	phase VARCHAR(16) NOT NULL, 
	why TEXT NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	boot_wall_s DOUBLE, 
	wall_at DATETIME, 
	lead_s DOUBLE NOT NULL, 
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
	beat_at DATETIME, 
	CONSTRAINT pk_sessions PRIMARY KEY (id), 
	CONSTRAINT fk_sessions_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_sessions_run_id UNIQUE (run_id, number)
);
INSERT INTO "sessions" VALUES(1,'r1',1,'local','suspended','the wall','b',100.0,'2026-11-20 12:00:00.000000',3.0,'2026-11-20 20:04:31.657908','2026-11-20 20:04:31.669001',NULL,NULL,'',0,1,4,42,100,420,0.5,'{"dice": 0.5}','2026-11-20 20:04:31.662844');
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
INSERT INTO "stages" VALUES(1,'r1',0,'train',NULL,'');
CREATE INDEX ix_resumes_due_at ON resumes (due_at);
CREATE INDEX ix_resumes_run_id ON resumes (run_id);
CREATE INDEX ix_resumes_state ON resumes (state);
CREATE INDEX ix_sessions_phase ON sessions (phase);
CREATE INDEX ix_charges_from_at ON charges (from_at);
CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);
CREATE INDEX ix_events_run_id_id ON events (run_id, id);
CREATE INDEX ix_samples_session_span_at ON samples (session_id, span_s, at);
COMMIT;
